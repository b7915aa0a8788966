"""Sizes of captured steps reach what is asked, and leave little padding."""

from meshwright.policy.captured import captured_size, captured_sizes


def test_sizes_are_near_each_other_where_steps_are_short() -> None:
    assert captured_sizes(0) == ()
    assert captured_sizes(40) == (32, 40)
    assert captured_sizes(640)[-4:] == (480, 512, 576, 640)
    assert captured_sizes(1200)[-3:] == (1024, 1152, 1200)


def test_a_step_has_the_next_size_or_none() -> None:
    assert captured_size(0, 0, 96) == 0
    assert [captured_size(tokens, 1, 96) for tokens in (1, 32, 33, 96)] == [32, 32, 64, 96]
    assert captured_size(97, 1, 96) == 0
    assert captured_size(1, 1, 0) == 0


def test_choices_of_one_prompt_are_held_as_well() -> None:
    assert captured_size(5, 40, 96) == 64
    assert captured_size(5, 97, 96) == 0
