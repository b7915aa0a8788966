"""What lies on GPUs that both sides share, by the phases that a controller tells."""

from typing import get_args

import pytest

from meshwright.policy.rollout import (
    ColocatedPhase,
    DropAction,
    GenerateAction,
    MemoryPhaseAction,
    RolloutController,
    RolloutPolicy,
    SyncAction,
    TrainAction,
    get_engine_memory_fraction,
    list_resident_regions,
    shares_weights,
)

NAMES: dict[type, ColocatedPhase] = {
    GenerateAction: "generating",
    SyncAction: "syncing",
    TrainAction: "training",
}


@pytest.mark.parametrize(
    ("doing", "lies"),
    [
        ("generating", {"policy", "served", "cache"}),
        ("training", {"policy", "training", "step"}),
        ("syncing", {"policy", "served", "aside"}),
    ],
)
def test_turns_leave_room_for_who_has_them(doing: ColocatedPhase, lies: set[str]) -> None:
    assert list_resident_regions(doing, by_turns=True) == lies
    always = {"policy", "training", "served", "cache"}
    assert list_resident_regions(doing, by_turns=False) == always | (lies & {"step", "aside"})


def test_an_engine_that_is_lent_weights_gives_none_up() -> None:
    assert list_resident_regions("training", by_turns=True, lent=True) == {
        "policy",
        "training",
        "step",
        "served",
    }
    assert list_resident_regions("generating", by_turns=True, lent=True) == list_resident_regions(
        "generating", by_turns=True
    )
    assert shares_weights(adapted=True, one_process=True)
    assert not shares_weights(adapted=False, one_process=True), "the trainer changes them"
    assert not shares_weights(adapted=True, one_process=False)


def test_every_action_of_a_controller_finds_what_is_promised() -> None:
    """Walk through its phases with what each says that it moves."""
    lies, seen = {"policy", "served", "cache"}, []
    controller = RolloutController(RolloutPolicy(groups_per_step=1, total_steps=3, colocated=True))
    while not controller.is_done:
        for action in controller.start_actions():
            assert not isinstance(action, DropAction), "nothing is too old"
            match action:
                case MemoryPhaseAction("sleep"):
                    lies -= {"served", "cache"}
                case MemoryPhaseAction("load"):
                    lies |= {"training"}
                case MemoryPhaseAction("offload"):
                    lies -= {"training"}
                case MemoryPhaseAction("wake weights"):
                    lies |= {"served"}
                case MemoryPhaseAction("wake cache"):
                    lies |= {"cache"}
                case GenerateAction() | SyncAction() | TrainAction():
                    doing = NAMES[type(action)]
                    assert lies == list_resident_regions(doing, by_turns=True) - {"step", "aside"}
                    seen.append(doing)
            controller.complete_action(action)
    assert seen == ["generating", "training", "syncing"] * 2 + ["generating", "training"]
    assert set(seen) == set(get_args(ColocatedPhase))


def test_an_engine_beside_a_trainer_that_takes_no_turns_has_half() -> None:
    assert get_engine_memory_fraction(beside=True, by_turns=False) == 0.5
    assert get_engine_memory_fraction(beside=True, by_turns=True) == get_engine_memory_fraction(
        beside=False, by_turns=False
    )
