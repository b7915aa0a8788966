"""Sizes of captured steps reach what is asked, and leave little padding."""

from meshwright.policy.serving.graph_sizes import (
    find_padded_size,
    list_decode_graph_sizes,
    list_mixed_graph_sizes,
)


def test_sizes_are_dense_where_batches_are_small() -> None:
    assert list_decode_graph_sizes(1) == (1,)
    assert list_decode_graph_sizes(5) == (1, 2, 4, 5)
    assert list_decode_graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert list_decode_graph_sizes(30) == (1, 2, 4, 8, 16, 24, 30)


def test_sizes_are_near_each_other_where_steps_are_short() -> None:
    assert list_mixed_graph_sizes(0) == ()
    assert list_mixed_graph_sizes(40) == (32, 40)
    assert list_mixed_graph_sizes(640)[-4:] == (480, 512, 576, 640)
    assert list_mixed_graph_sizes(1200)[-3:] == (1024, 1152, 1200)


def test_a_step_has_the_next_size_or_none() -> None:
    assert find_padded_size(0, 0, 96) == 0
    assert [find_padded_size(tokens, 1, 96) for tokens in (1, 32, 33, 96)] == [32, 32, 64, 96]
    assert find_padded_size(97, 1, 96) == 0
    assert find_padded_size(1, 1, 0) == 0


def test_choices_of_one_prompt_are_held_as_well() -> None:
    assert find_padded_size(5, 40, 96) == 64
    assert find_padded_size(5, 97, 96) == 0
