"""What lies on GPUs that both sides share, by the phases that a controller tells."""

from typing import get_args

import pytest

from meshwright.policy.rollout import (
    Arrangement,
    Controller,
    Doing,
    Drop,
    Generate,
    Phase,
    Sync,
    Train,
    engine_share,
    held,
    lends_weights,
)

NAMES: dict[type, Doing] = {Generate: "generating", Sync: "syncing", Train: "training"}


@pytest.mark.parametrize(
    ("doing", "lies"),
    [
        ("generating", {"policy", "served", "cache"}),
        ("training", {"policy", "training", "step"}),
        ("syncing", {"policy", "served", "aside"}),
    ],
)
def test_turns_leave_room_for_who_has_them(doing: Doing, lies: set[str]) -> None:
    assert held(doing, by_turns=True) == lies
    always = {"policy", "training", "served", "cache"}
    assert held(doing, by_turns=False) == always | (lies & {"step", "aside"})


def test_an_engine_that_is_lent_weights_gives_none_up() -> None:
    assert held("training", by_turns=True, lent=True) == {"policy", "training", "step", "served"}
    assert held("generating", by_turns=True, lent=True) == held("generating", by_turns=True)
    assert lends_weights(adapted=True, one_process=True)
    assert not lends_weights(adapted=False, one_process=True), "the trainer changes them"
    assert not lends_weights(adapted=True, one_process=False)


def test_every_action_of_a_controller_finds_what_is_promised() -> None:
    """Walk through its phases with what each says that it moves."""
    lies, seen = {"policy", "served", "cache"}, []
    controller = Controller(Arrangement(groups=1, steps=3, shared=True))
    while not controller.is_done:
        for action in controller.begin():
            assert not isinstance(action, Drop), "nothing is too old"
            match action:
                case Phase("sleep"):
                    lies -= {"served", "cache"}
                case Phase("load"):
                    lies |= {"training"}
                case Phase("offload"):
                    lies -= {"training"}
                case Phase("wake weights"):
                    lies |= {"served"}
                case Phase("wake cache"):
                    lies |= {"cache"}
                case Generate() | Sync() | Train():
                    doing = NAMES[type(action)]
                    assert lies == held(doing, by_turns=True) - {"step", "aside"}
                    seen.append(doing)
            controller.end(action)
    assert seen == ["generating", "training", "syncing"] * 2 + ["generating", "training"]
    assert set(seen) == set(get_args(Doing))


def test_an_engine_beside_a_trainer_that_takes_no_turns_has_half() -> None:
    assert engine_share(beside=True, by_turns=False) == 0.5
    assert engine_share(beside=True, by_turns=True) == engine_share(beside=False, by_turns=False)
