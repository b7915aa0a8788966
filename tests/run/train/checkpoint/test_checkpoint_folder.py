"""Which checkpoints a policy lets go."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.train.checkpoint.checkpoint_folder import RetentionEntry, select_expired


def _sound(*steps: int) -> list[RetentionEntry]:
    return [RetentionEntry(serial, step, True) for serial, step in enumerate(steps, 1)]


def test_the_newest_stay() -> None:
    assert select_expired(_sound(10, 20, 30, 40), keep_last=2, keep_every=None) == (2, 1)


def test_round_steps_stay_for_good() -> None:
    assert select_expired(_sound(10, 20, 30, 40, 50), keep_last=1, keep_every=20) == (3, 1)


def test_only_the_newest_save_of_a_round_step_stays() -> None:
    assert select_expired(_sound(20, 20, 50), keep_last=1, keep_every=20) == (1,)


def test_newer_means_saved_later_not_a_higher_step() -> None:
    assert select_expired(_sound(300, 100, 200), keep_last=2, keep_every=None) == (1,)


def test_damaged_ones_stay_until_enough_sound_ones_are_newer() -> None:
    present = [
        RetentionEntry(1, 10, True),
        RetentionEntry(2, 20, False),
        RetentionEntry(3, 30, True),
    ]
    assert select_expired(present, keep_last=2, keep_every=None) == ()
    assert select_expired(
        [*present, RetentionEntry(4, 40, True)], keep_last=2, keep_every=None
    ) == (2, 1)


PRESENT = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12).map(
    lambda rows: [
        RetentionEntry(serial, step * 10, sound) for serial, (step, sound) in enumerate(rows)
    ]
)


@given(PRESENT, st.integers(1, 4), st.none() | st.integers(1, 50))
def test_the_newest_sound_ones_never_go(
    present: list[RetentionEntry], keep_last: int, keep_every: int | None
) -> None:
    gone = select_expired(present, keep_last=keep_last, keep_every=keep_every)
    sound = [one.serial for one in present if one.is_complete]
    assert not set(gone) & set(sound[-keep_last:])
    assert bool(gone) <= bool(sound)
