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
    STALE_POLICIES,
    Action,
    DropAction,
    GenerateAction,
    GroupEnd,
    MemoryPhaseAction,
    RolloutController,
    RolloutPolicy,
    SyncAction,
    TrainAction,
    build_rollout_policy,
)
from tests.policy.rollout.driven import Driven

seeds = st.integers(0, 2**32)


@st.composite
def arrangements(draw: st.DrawFn) -> RolloutPolicy:
    staleness = draw(st.integers(0, 4))
    return RolloutPolicy(
        groups_per_step=draw(st.integers(1, 5)),
        total_steps=draw(st.integers(1, 6)),
        max_staleness=staleness,
        in_flight_weight_updates=draw(st.booleans()),
        consume_order=draw(st.sampled_from(["submitted", "completed"])),
        on_stale=draw(st.sampled_from(STALE_POLICIES)),
        sync_interval_steps=draw(st.integers(1, staleness + 1)),
        max_concurrent_groups=draw(st.none() | st.integers(1, 7)),
    )


def synchronous(groups: int, steps: int) -> list[Action]:
    """The loop that everybody knows."""
    found: list[Action] = []
    for step in range(steps):
        batch = tuple(range(step * groups, (step + 1) * groups))
        if step:
            found.append(SyncAction(step))
        found += [GenerateAction(group, 0, step) for group in batch]
        found.append(TrainAction(step, batch, (step,) * groups))
    return found


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_without_staleness_everything_begins_in_the_order_of_the_synchronous_loop(
    terms: RolloutPolicy, seed: int
) -> None:
    exact = RolloutPolicy(
        groups_per_step=terms.groups_per_step,
        total_steps=terms.total_steps,
        in_flight_weight_updates=terms.in_flight_weight_updates,
        consume_order=terms.consume_order,
        on_stale=terms.on_stale,
        max_concurrent_groups=terms.max_concurrent_groups,
    )
    assert Driven(exact, seed).go().begun == synchronous(terms.groups_per_step, terms.total_steps)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), seeds)
def test_colocated_is_the_same_loop_with_memory_phases_between(
    groups: int, steps: int, seed: int
) -> None:
    run = Driven(build_rollout_policy("colocated", groups=groups, steps=steps), seed).go()
    assert [one for one in run.begun if not isinstance(one, MemoryPhaseAction)] == synchronous(
        groups, steps
    )
    names = [
        one.phase if isinstance(one, MemoryPhaseAction) else type(one).__name__ for one in run.begun
    ]
    turn = ["sleep", "load", "TrainAction", "offload", "wake weights", "SyncAction", "wake cache"]
    between = [name for name in names if name != "GenerateAction"]
    assert between == (turn * steps)[: len(turn) * steps - 4]
    # One thing at a time: what begins has the GPUs for itself, but for groups beside each other.
    open_: Counter[str] = Counter()
    for what, action in run.log:
        kind = "groups" if isinstance(action, GenerateAction) else "others"
        open_[kind] += 1 if what == "begin" else -1
        assert open_["others"] <= 1
        assert not (open_["groups"] and open_["others"])


@settings(max_examples=300, deadline=None)
@given(arrangements(), seeds)
def test_no_group_is_trained_on_twice_and_none_too_old(terms: RolloutPolicy, seed: int) -> None:
    run = Driven(terms, seed).go()
    steps = [one for one in run.begun if isinstance(one, TrainAction)]
    assert [one.step for one in steps] == list(range(terms.total_steps))
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups_per_step * terms.total_steps
    for one in steps:
        assert all(0 <= one.step - version <= terms.max_staleness for version in one.versions)
    if terms.consume_order == "submitted":
        assert run.controller.dropped_groups == 0
        assert trained == list(range(terms.groups_per_step * terms.total_steps))
    if terms.on_stale == "wait":
        assert run.controller.dropped_groups == 0
    if terms.on_stale != "drop":
        assert sorted(trained) == list(range(terms.groups_per_step * terms.total_steps))


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_weights_come_in_only_where_groups_may_be_interrupted_or_nothing_runs(
    terms: RolloutPolicy, seed: int
) -> None:
    under_way: set[GenerateAction] = set()
    synced, syncing = 0, False
    for what, action in Driven(terms, seed).go().log:
        if isinstance(action, GenerateAction):
            assert not (syncing and what == "begin")
            assert what == "end" or action.version == synced
            under_way ^= {action}
        elif isinstance(action, DropAction) and action.is_running:
            under_way.remove(GenerateAction(action.group, action.attempt, action.version))
        elif isinstance(action, SyncAction):
            assert terms.in_flight_weight_updates or not under_way
            syncing = what == "begin"
            synced = action.version if what == "end" else synced


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds)
def test_lost_groups_come_again_and_useless_ones_are_replaced(
    terms: RolloutPolicy, seed: int
) -> None:
    useless: set[int] = set()

    def judge(asked: GenerateAction, rng: Random) -> GroupEnd:
        drawn = rng.random()
        if drawn < 0.15:
            useless.add(asked.group)
            return "useless"
        return "lost" if drawn < 0.3 else "kept"

    run = Driven(terms, seed, judge).go()
    trained = [group for one in run.begun if isinstance(one, TrainAction) for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups_per_step * terms.total_steps
    assert useless.isdisjoint(trained)
    for one in run.begun:
        if isinstance(one, TrainAction):
            assert all(one.step - version <= terms.max_staleness for version in one.versions)
    if terms.max_staleness == 0:
        # All that was begun and was of use is trained on: nothing is lost on the way.
        asked = {one.group for one in run.begun if isinstance(one, GenerateAction)}
        assert asked == set(trained) | useless


@settings(max_examples=200, deadline=None)
@given(arrangements(), st.integers(0, 4), seeds, st.integers(0, 60))
def test_steps_replace_no_more_groups_than_there_are_prompts_to_spare(
    terms: RolloutPolicy, spare: int, seed: int, when: int
) -> None:
    terms = msgspec.structs.replace(terms, extra_groups=spare)

    def judge(asked: GenerateAction, _: Random) -> GroupEnd:
        # Whatever the clock: a prompt is of use or is not.
        return "useless" if Random(asked.group).random() < 0.5 else "kept"

    before = Driven(terms, seed, judge).go(when)
    after = Driven(terms, seed + 1, judge)
    kept = before.controller.progress()
    after.controller = RolloutController(terms, kept)
    after.go()
    first = [one for one in before.begun if isinstance(one, TrainAction)][: kept.trained_steps]
    steps = first + [one for one in after.begun if isinstance(one, TrainAction)]
    assert [one.step for one in steps] == list(range(terms.total_steps))
    # A step that was under way counts what was replaced beside it, too.
    assert all(
        one.replaced_groups <= spare * (1 + (one.step == kept.trained_steps)) for one in steps
    )
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained) == terms.groups_per_step * terms.total_steps
    if not terms.max_staleness:
        for one in steps:
            poor = [
                group
                for group in one.groups
                if judge(GenerateAction(group, 0, 0), Random()) != "kept"
            ]
            assert not poor or one.replaced_groups == spare
        # Prompts are used up in their order, whatever took how long and wherever it was killed.
        whole = Driven(terms, seed + 2, judge).go()
        assert steps == [one for one in whole.begun if isinstance(one, TrainAction)]


def test_further_prompts_begin_together_once_nothing_else_runs() -> None:
    controller = RolloutController(
        build_rollout_policy("disaggregated", groups=3, steps=1, extra_groups=2)
    )
    zero, one, two = (
        each for each in controller.start_actions() if isinstance(each, GenerateAction)
    )
    controller.complete_action(two, "useless")
    controller.complete_action(zero, "useless")
    assert controller.start_actions() == []
    controller.complete_action(one)
    dropped = [
        DropAction(group, 0, 0, is_running=False, requeue=False, no_signal=True) for group in (0, 2)
    ]
    three, four = GenerateAction(3, 0, 0), GenerateAction(4, 0, 0)
    assert controller.start_actions() == [*dropped, three, four]
    controller.complete_action(three, "useless")
    controller.complete_action(four)
    # Two were all there were to spare.
    assert controller.start_actions() == [TrainAction(0, (1, 3, 4), (0, 0, 0), replaced_groups=2)]


@settings(max_examples=200, deadline=None)
@given(arrangements(), seeds, st.integers(0, 60))
def test_a_run_that_was_killed_goes_on_with_nothing_lost_or_done_twice(
    terms: RolloutPolicy, seed: int, when: int
) -> None:
    before = Driven(terms, seed).go(when)
    kept = before.controller.progress()
    after = Driven(terms, seed + 1)
    after.controller = RolloutController(terms, kept)
    after.go()
    first = [one for one in before.begun if isinstance(one, TrainAction)][: kept.trained_steps]
    steps = first + [one for one in after.begun if isinstance(one, TrainAction)]
    assert [one.step for one in steps] == list(range(terms.total_steps))
    trained = [group for one in steps for group in one.groups]
    assert len(set(trained)) == len(trained)
    for one in steps:
        assert all(one.step - version <= terms.max_staleness for version in one.versions)
    if terms.on_stale != "drop":
        assert sorted(trained) == list(range(terms.groups_per_step * terms.total_steps))


def test_one_step_off_trains_on_what_the_weights_before_wrote() -> None:
    for seed in range(20):
        run = Driven(build_rollout_policy("one_step_off", groups=4, steps=6), seed).go()
        for one in run.begun:
            if isinstance(one, TrainAction):
                assert set(one.versions) == {max(0, one.step - 1)}


def test_long_groups_hold_nobody_up_where_steps_take_what_has_ended() -> None:
    terms = build_rollout_policy("async", groups=2, steps=6, max_staleness=1, on_stale="regenerate")
    controller = RolloutController(terms)
    long, *others = [one for one in controller.start_actions() if isinstance(one, GenerateAction)]
    assert [one.group for one in others] == [1, 2, 3]
    for one in others[:2]:
        controller.complete_action(one)
    (step,) = controller.start_actions()
    assert step == TrainAction(0, (1, 2), (0, 0))
    assert controller.idle_reasons == ()
    controller.complete_action(step)
    assert controller.start_actions() == [SyncAction(1)]
    controller.complete_action(SyncAction(1))
    # The next two begin with new weights, while group 0 still runs.
    begun = controller.start_actions()
    assert begun == [GenerateAction(4, 0, 1), GenerateAction(5, 0, 1)]
    controller.complete_action(others[2])
    controller.complete_action(GenerateAction(4, 0, 1))
    (step,) = controller.start_actions()
    assert step == TrainAction(1, (3, 4), (0, 1))
    controller.complete_action(step)
    # It began two steps ago, so it is stopped and its prompt comes first.
    dropped, synced = controller.start_actions()
    assert dropped == DropAction(0, 0, 0, is_running=True, requeue=True)
    with pytest.raises(InputError, match="group 0, attempt 0, does not run"):
        controller.complete_action(long)
    assert synced == SyncAction(2)
    controller.complete_action(SyncAction(2))
    assert controller.start_actions()[0] == GenerateAction(0, 1, 2)


def test_a_step_waits_for_what_the_next_could_not_take() -> None:
    controller = RolloutController(
        build_rollout_policy("async", groups=2, steps=6, max_staleness=1)
    )
    long, *others = [one for one in controller.start_actions() if isinstance(one, GenerateAction)]
    for one in others:
        controller.complete_action(one)
    # The first step leaves it behind; the second is the last that it is not too old for.
    assert controller.start_actions() == [TrainAction(0, (1, 2), (0, 0))]
    controller.complete_action(TrainAction(0, (1, 2), (0, 0)))
    controller.start_actions()
    controller.complete_action(SyncAction(1))
    for action in controller.start_actions():
        assert isinstance(action, GenerateAction)
        controller.complete_action(action)
    assert controller.start_actions() == []
    assert str(controller.idle_reasons[0]) == "the trainer waits: groups, for groups 0"
    controller.complete_action(long)
    assert controller.start_actions() == [TrainAction(1, (0, 3), (0, 0))]


def test_steps_wait_in_time_for_old_groups_that_would_not_all_fit_into_the_last() -> None:
    controller = RolloutController(
        build_rollout_policy("async", groups=2, steps=6, max_staleness=2)
    )
    zero, one, *late = (
        each for each in controller.start_actions() if isinstance(each, GenerateAction)
    )
    assert len(late) == 4
    for each in (zero, one):
        controller.complete_action(each)
    (step,) = controller.start_actions()
    assert step == TrainAction(0, (0, 1), (0, 0))
    controller.complete_action(step)
    controller.start_actions()
    controller.complete_action(SyncAction(1))
    newer = [each for each in controller.start_actions() if isinstance(each, GenerateAction)]
    for each in newer:
        controller.complete_action(each)
    # Two newer groups would do, but step 2 could not take all four that are older.
    assert controller.start_actions() == []
    assert str(controller.idle_reasons[0]) == "the trainer waits: groups, for groups 2, 3, 4, 5"
    controller.complete_action(late[0])
    assert controller.start_actions() == []
    controller.complete_action(late[3])
    assert controller.start_actions() == [TrainAction(1, (2, 5), (0, 0))]


def test_every_wait_has_a_name_and_says_for_whom() -> None:
    controller = RolloutController(build_rollout_policy("disaggregated", groups=2, steps=2))
    begun = controller.start_actions()
    (wait,) = controller.idle_reasons
    assert str(wait) == "the trainer waits: groups, for groups 0, 1"
    for one in begun:
        assert isinstance(one, GenerateAction)
        controller.complete_action(one)
    (train,) = controller.start_actions()
    assert isinstance(train, TrainAction)
    assert [str(one) for one in controller.idle_reasons] == ["engines wait: staleness"]
    controller.complete_action(train)
    assert controller.start_actions() == [SyncAction(1)]
    assert [str(one) for one in controller.idle_reasons] == ["engines wait: weights"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_which_waits_a_placement_knows(placement: str) -> None:
    run = Driven(build_rollout_policy(placement, groups=4, steps=8), 3).go()  # type: ignore[arg-type]
    seen = {(wait.side, wait.cause) for wait in run.waits}
    assert ("trainer", "groups") in seen
    assert (("engines", "memory") in seen) == (placement == "colocated")
    assert (("engines", "staleness") in seen) == (placement != "colocated")
    assert (("trainer", "drain") in seen) == (placement == "one_step_off")


def test_what_was_not_begun_cannot_end() -> None:
    controller = RolloutController(build_rollout_policy("disaggregated", groups=1, steps=1))
    controller.start_actions()
    with pytest.raises(InputError, match="was not begun"):
        controller.complete_action(SyncAction(1))
    controller.complete_action(GenerateAction(0, 0, 0))
    with pytest.raises(InputError, match="does not run"):
        controller.complete_action(GenerateAction(0, 0, 0))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"groups_per_step": 0}, "groups_per_step: 0 is not a whole number"),
        ({"colocated": True, "max_staleness": 1}, "take turns with the trainer"),
        ({"sync_interval_steps": 3, "max_staleness": 1}, "3 steps between syncs"),
        ({"consume_order": "random"}, "order"),
    ],
)
def test_what_cannot_be_arranged_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RolloutPolicy(**{"groups_per_step": 4, "total_steps": 2, **fields})  # type: ignore[arg-type]


def test_a_placement_says_what_its_staleness_is() -> None:
    with pytest.raises(InputError, match="one_step_off means 1, not 3"):
        build_rollout_policy("one_step_off", groups=1, steps=1, max_staleness=3)
    with pytest.raises(InputError, match="placement"):
        build_rollout_policy("nearby", groups=1, steps=1)  # type: ignore[arg-type]
    assert build_rollout_policy("async", groups=1, steps=1, max_staleness=4).max_staleness == 4
