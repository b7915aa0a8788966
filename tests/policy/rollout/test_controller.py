"""The controller: synchronous where it has to be, bounded staleness, nothing lost or done twice."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.rollout import (
    PLACEMENTS,
    TOO_OLD,
    Action,
    Arrangement,
    Controller,
    Drop,
    Ending,
    Generate,
    Phase,
    Sync,
    Train,
    arranged,
)
from tests.policy.rollout.driven import Driven

seeds = st.integers(0, 2**32)


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    staleness = draw(st.integers(0, 4))
    return Arrangement(
        groups=draw(st.integers(1, 5)),
        steps=draw(st.integers(1, 6)),
        max_staleness=staleness,
        interrupt=draw(st.booleans()),
        order=draw(st.sampled_from(["asked", "ended"])),
        too_old=draw(st.sampled_from(TOO_OLD)),
        sync_every=draw(st.integers(1, staleness + 1)),
        running=draw(st.none() | st.integers(1, 7)),
    )


def synchronous(groups: int, steps: int) -> list[Action]:
    """The loop that everybody knows."""
    found: list[Action] = []
    for step in range(steps):
        batch = tuple(range(step * groups, (step + 1) * groups))
        if step:
            found.append(Sync(step))
        found += [Generate(group, 0, step) for group in batch]
        found.append(Train(step, batch, (step,) * groups))
    return found


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_without_staleness_everything_begins_in_the_order_of_the_synchronous_loop(
    terms: Arrangement, seed: int
) -> None:
    exact = Arrangement(
        groups=terms.groups, steps=terms.steps, interrupt=terms.interrupt, order=terms.order,
        too_old=terms.too_old, running=terms.running,
    )  # fmt: skip
    assert Driven(exact, seed).go().begun == synchronous(terms.groups, terms.steps)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), seeds)
def test_colocated_is_the_same_loop_with_memory_phases_between(
    groups: int, steps: int, seed: int
) -> None:
    run = Driven(arranged("colocated", groups=groups, steps=steps), seed).go()
    assert [one for one in run.begun if not isinstance(one, Phase)] == synchronous(groups, steps)
    names = [one.name if isinstance(one, Phase) else type(one).__name__ for one in run.begun]
    turn = ["sleep", "load", "Train", "offload", "wake weights", "Sync", "wake cache"]
    between = [name for name in names if name != "Generate"]
    assert between == (turn * steps)[: len(turn) * steps - 4]
    # One thing at a time: what begins has the GPUs for itself, but for groups beside each other.
    open_: Counter[str] = Counter()
    for what, action in run.log:
        kind = "groups" if isinstance(action, Generate) else "others"
        open_[kind] += 1 if what == "begin" else -1
        assert open_["others"] <= 1
        assert not (open_["groups"] and open_["others"])


@settings(max_examples=300, deadline=None)
@given(arrangements(), seeds)
def test_no_group_is_trained_on_twice_and_none_too_old(terms: Arrangement, seed: int) -> None:
    run = Driven(terms, seed).go()
    steps = [one for one in run.begun if isinstance(one, Train)]
    assert [one.step for one in steps] == list(range(terms.steps))
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups * terms.steps
    for one in steps:
        assert all(0 <= one.step - version <= terms.max_staleness for version in one.versions)
    if terms.order == "asked":
        assert run.controller.dropped == 0
        assert trained == list(range(terms.groups * terms.steps))
    if terms.too_old == "wait":
        assert run.controller.dropped == 0
    if terms.too_old != "drop":
        assert sorted(trained) == list(range(terms.groups * terms.steps))


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_weights_come_in_only_where_groups_may_be_interrupted_or_nothing_runs(
    terms: Arrangement, seed: int
) -> None:
    under_way: set[Generate] = set()
    synced, syncing = 0, False
    for what, action in Driven(terms, seed).go().log:
        if isinstance(action, Generate):
            assert not (syncing and what == "begin")
            assert what == "end" or action.version == synced
            under_way ^= {action}
        elif isinstance(action, Drop) and action.running:
            under_way.remove(Generate(action.group, action.attempt, action.version))
        elif isinstance(action, Sync):
            assert terms.interrupt or not under_way
            syncing = what == "begin"
            synced = action.version if what == "end" else synced


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_lost_groups_come_again_and_useless_ones_are_replaced(
    terms: Arrangement, seed: int
) -> None:
    useless: set[int] = set()

    def judge(asked: Generate, rng: Random) -> Ending:
        drawn = rng.random()
        if drawn < 0.15:
            useless.add(asked.group)
            return "useless"
        return "lost" if drawn < 0.3 else "kept"

    run = Driven(terms, seed, judge).go()
    trained = [group for one in run.begun if isinstance(one, Train) for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups * terms.steps
    assert useless.isdisjoint(trained)
    for one in run.begun:
        if isinstance(one, Train):
            assert all(one.step - version <= terms.max_staleness for version in one.versions)
    if terms.max_staleness == 0:
        # All that was begun and was of use is trained on: nothing is lost on the way.
        asked = {one.group for one in run.begun if isinstance(one, Generate)}
        assert asked == set(trained) | useless


@settings(max_examples=200, deadline=None)
@given(arrangements(), st.integers(0, 4), seeds, st.integers(0, 60))
def test_steps_replace_no_more_groups_than_there_are_prompts_to_spare(
    terms: Arrangement, spare: int, seed: int, when: int
) -> None:
    terms = msgspec.structs.replace(terms, spare=spare)

    def judge(asked: Generate, _: Random) -> Ending:
        # Whatever the clock: a prompt is of use or is not.
        return "useless" if Random(asked.group).random() < 0.5 else "kept"

    before = Driven(terms, seed, judge).go(when)
    after = Driven(terms, seed + 1, judge)
    kept = before.controller.progress()
    after.controller = Controller(terms, kept)
    after.go()
    first = [one for one in before.begun if isinstance(one, Train)][: kept.trained]
    steps = first + [one for one in after.begun if isinstance(one, Train)]
    assert [one.step for one in steps] == list(range(terms.steps))
    # A step that was under way counts what was replaced beside it, too.
    assert all(one.replaced <= spare * (1 + (one.step == kept.trained)) for one in steps)
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups * terms.steps
    if not terms.max_staleness:
        for one in steps:
            poor = [
                group for group in one.groups if judge(Generate(group, 0, 0), Random()) != "kept"
            ]
            assert not poor or one.replaced == spare
        # Prompts are used up in their order, whatever took how long and wherever it was killed.
        whole = Driven(terms, seed + 2, judge).go()
        assert steps == [one for one in whole.begun if isinstance(one, Train)]


def test_further_prompts_begin_together_once_nothing_else_runs() -> None:
    controller = Controller(arranged("disaggregated", groups=3, steps=1, spare=2))
    zero, one, two = (each for each in controller.begin() if isinstance(each, Generate))
    controller.end(two, "useless")
    controller.end(zero, "useless")
    assert controller.begin() == []
    controller.end(one)
    dropped = [Drop(group, 0, 0, running=False, again=False, useless=True) for group in (0, 2)]
    three, four = Generate(3, 0, 0), Generate(4, 0, 0)
    assert controller.begin() == [*dropped, three, four]
    controller.end(three, "useless")
    controller.end(four)
    # Two were all there were to spare.
    assert controller.begin() == [Train(0, (1, 3, 4), (0, 0, 0), replaced=2)]


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds, st.integers(0, 60))
def test_a_run_that_was_killed_goes_on_with_nothing_lost_or_done_twice(
    terms: Arrangement, seed: int, when: int
) -> None:
    before = Driven(terms, seed).go(when)
    kept = before.controller.progress()
    after = Driven(terms, seed + 1)
    after.controller = Controller(terms, kept)
    after.go()
    first = [one for one in before.begun if isinstance(one, Train)][: kept.trained]
    steps = first + [one for one in after.begun if isinstance(one, Train)]
    assert [one.step for one in steps] == list(range(terms.steps))
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained)
    for one in steps:
        assert all(one.step - version <= terms.max_staleness for version in one.versions)
    if terms.too_old != "drop":
        assert sorted(trained) == list(range(terms.groups * terms.steps))


def test_one_step_off_trains_on_what_the_weights_before_wrote() -> None:
    for seed in range(20):
        run = Driven(arranged("one-step-off", groups=4, steps=6), seed).go()
        for one in run.begun:
            if isinstance(one, Train):
                assert set(one.versions) == {max(0, one.step - 1)}


def test_long_groups_hold_nobody_up_where_steps_take_what_has_ended() -> None:
    terms = arranged("asynchronous", groups=2, steps=6, max_staleness=1, too_old="again")
    controller = Controller(terms)
    long, *others = [one for one in controller.begin() if isinstance(one, Generate)]
    assert [one.group for one in others] == [1, 2, 3]
    for one in others[:2]:
        controller.end(one)
    (step,) = controller.begin()
    assert step == Train(0, (1, 2), (0, 0))
    assert controller.waits == ()
    controller.end(step)
    assert controller.begin() == [Sync(1)]
    controller.end(Sync(1))
    # The next two begin with new weights, while group 0 still runs.
    begun = controller.begin()
    assert begun == [Generate(4, 0, 1), Generate(5, 0, 1)]
    controller.end(others[2])
    controller.end(Generate(4, 0, 1))
    (step,) = controller.begin()
    assert step == Train(1, (3, 4), (0, 1))
    controller.end(step)
    # It began two steps ago, so it is stopped and its prompt comes first.
    dropped, synced = controller.begin()
    assert dropped == Drop(0, 0, 0, running=True, again=True)
    with pytest.raises(InputError, match="group 0, attempt 0, does not run"):
        controller.end(long)
    assert synced == Sync(2)
    controller.end(Sync(2))
    assert controller.begin()[0] == Generate(0, 1, 2)


def test_a_step_waits_for_what_the_next_could_not_take() -> None:
    controller = Controller(arranged("asynchronous", groups=2, steps=6, max_staleness=1))
    long, *others = [one for one in controller.begin() if isinstance(one, Generate)]
    for one in others:
        controller.end(one)
    # The first step leaves it behind; the second is the last that it is not too old for.
    assert controller.begin() == [Train(0, (1, 2), (0, 0))]
    controller.end(Train(0, (1, 2), (0, 0)))
    controller.begin()
    controller.end(Sync(1))
    for action in controller.begin():
        assert isinstance(action, Generate)
        controller.end(action)
    assert controller.begin() == []
    assert str(controller.waits[0]) == "the trainer waits: groups, for groups 0"
    controller.end(long)
    assert controller.begin() == [Train(1, (0, 3), (0, 0))]


def test_steps_wait_in_time_for_old_groups_that_would_not_all_fit_into_the_last() -> None:
    controller = Controller(arranged("asynchronous", groups=2, steps=6, max_staleness=2))
    zero, one, *late = (each for each in controller.begin() if isinstance(each, Generate))
    assert len(late) == 4
    for each in (zero, one):
        controller.end(each)
    (step,) = controller.begin()
    assert step == Train(0, (0, 1), (0, 0))
    controller.end(step)
    controller.begin()
    controller.end(Sync(1))
    newer = [each for each in controller.begin() if isinstance(each, Generate)]
    for each in newer:
        controller.end(each)
    # Two newer groups would do, but step 2 could not take all four that are older.
    assert controller.begin() == []
    assert str(controller.waits[0]) == "the trainer waits: groups, for groups 2, 3, 4, 5"
    controller.end(late[0])
    assert controller.begin() == []
    controller.end(late[3])
    assert controller.begin() == [Train(1, (2, 5), (0, 0))]


def test_every_wait_has_a_name_and_says_for_whom() -> None:
    controller = Controller(arranged("disaggregated", groups=2, steps=2))
    begun = controller.begin()
    (wait,) = controller.waits
    assert str(wait) == "the trainer waits: groups, for groups 0, 1"
    for one in begun:
        assert isinstance(one, Generate)
        controller.end(one)
    (train,) = controller.begin()
    assert isinstance(train, Train)
    assert [str(one) for one in controller.waits] == ["engines wait: staleness"]
    controller.end(train)
    assert controller.begin() == [Sync(1)]
    assert [str(one) for one in controller.waits] == ["engines wait: weights"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_which_waits_a_placement_knows(placement: str) -> None:
    run = Driven(arranged(placement, groups=4, steps=8), 3).go()  # type: ignore[arg-type]
    seen = {(wait.who, wait.name) for wait in run.waits}
    assert ("trainer", "groups") in seen
    assert (("engines", "memory") in seen) == (placement == "colocated")
    assert (("engines", "staleness") in seen) == (placement != "colocated")
    assert (("trainer", "drain") in seen) == (placement == "one-step-off")


def test_what_was_not_begun_cannot_end() -> None:
    controller = Controller(arranged("disaggregated", groups=1, steps=1))
    controller.begin()
    with pytest.raises(InputError, match="was not begun"):
        controller.end(Sync(1))
    controller.end(Generate(0, 0, 0))
    with pytest.raises(InputError, match="does not run"):
        controller.end(Generate(0, 0, 0))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"groups": 0}, "groups: 0 is not a whole number"),
        ({"shared": True, "max_staleness": 1}, "take turns with the trainer"),
        ({"sync_every": 3, "max_staleness": 1}, "3 steps between syncs"),
        ({"order": "random"}, "order"),
    ],
)
def test_what_cannot_be_arranged_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Arrangement(**{"groups": 4, "steps": 2, **fields})  # type: ignore[arg-type]


def test_a_placement_says_what_its_staleness_is() -> None:
    with pytest.raises(InputError, match="one-step-off means 1, not 3"):
        arranged("one-step-off", groups=1, steps=1, max_staleness=3)
    with pytest.raises(InputError, match="placement"):
        arranged("nearby", groups=1, steps=1)  # type: ignore[arg-type]
    assert arranged("asynchronous", groups=1, steps=1, max_staleness=4).max_staleness == 4
