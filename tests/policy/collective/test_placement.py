"""With separate buffers, slots are read from the input until they are first written."""

from collections import Counter

import pytest

from meshwright.policy.collective import Collective, build
from meshwright.policy.collective.contract import contract
from meshwright.policy.collective.hosting import hosted
from meshwright.policy.collective.lanes import programs
from meshwright.policy.collective.placement import (
    PlacedProgram,
    Region,
    given_slots,
    placed,
    wanted_slots,
)
from tests.policy.collective.gallery import gallery, label

GALLERY = list(gallery((3, 4)))
Value = Counter[tuple[int, int]]


def cells(regions: tuple[Region, ...]) -> list[tuple[str, int]]:
    return [(buffer, first + by) for buffer, first, length in regions for by in range(length)]


def outputs(collective: Collective) -> list[list[Value | None]]:
    """Carry out placed programs step by step, on memory that is empty except for the input."""
    plain = hosted(collective)
    lanes = [placed(plain, own) for own in programs(plain)]
    memory: list[dict[tuple[str, int], Value]] = [
        {("input", index): Counter({(own.rank, index): 1}) for index in range(own.input_chunks)}
        for own in lanes
    ]
    mail: dict[tuple[int, int, int], list[list[Value]]] = {}
    for step in range(-1, plain.steps):
        for sends in (True, False):
            for own in lanes:
                _step(own, memory[own.rank], mail, step, sends=sends)
    return [
        [memory[own.rank].get(("output", index)) for index in range(own.output_chunks)]
        for own in lanes
    ]


def _step(
    own: PlacedProgram,
    memory: dict[tuple[str, int], Value],
    mail: dict[tuple[int, int, int], list[list[Value]]],
    step: int,
    *,
    sends: bool,
) -> None:
    if step < 0 and sends:
        for source, target in own.copies:
            for here, there in zip(cells((source,)), cells((target,)), strict=True):
                memory[there] = memory[here]
    for entry in own.actions:
        action = entry.action
        if action.step != step or (action.kind == "send") is not sends:
            continue
        if sends:
            message = [memory[cell] for cell in cells(entry.reads)]
            mail.setdefault((own.rank, action.peer, action.channel), []).append(message)
            continue
        if action.kind.startswith("receive"):
            message = mail[action.peer, own.rank, action.channel].pop(0)
        else:
            message = [memory[cell] for cell in cells(entry.reads)]
        if entry.adds_to:
            bases = [memory[cell] for cell in cells(entry.adds_to)]
            message = [a + b for a, b in zip(message, bases, strict=True)]
        memory.update(zip(cells(entry.writes), message, strict=True))


@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_outputs_are_right_and_inputs_stay_untouched(collective: Collective) -> None:
    plain = hosted(collective)
    promise = contract(plain)
    found = outputs(collective)
    for rank, slot, number, part in promise.wanted.tolist():
        value = found[rank][slot - wanted_slots(plain, rank).start]
        if number < 0:
            first = given_slots(plain, 0).start
            assert value == Counter({(r, part - first): 1 for r in range(plain.ranks)})
        else:
            giver, index = divmod(number, promise.width)
            assert value == Counter({(giver, index - given_slots(plain, giver).start): 1})
    for own in (placed(plain, lane) for lane in programs(plain)):
        assert not any(region.buffer == "input" for e in own.actions for region in e.writes)


@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_given_and_wanted_slots_are_those_of_the_contract(collective: Collective) -> None:
    promise = contract(collective)
    for rank in range(collective.ranks):
        given = sorted(row[1] for row in promise.given.tolist() if row[0] == rank)
        wanted = sorted(row[1] for row in promise.wanted.tolist() if row[0] == rank)
        assert given == list(given_slots(collective, rank))
        assert wanted == list(wanted_slots(collective, rank))


def test_partial_sums_of_a_reduce_scatter_lie_in_scratch_memory() -> None:
    ring = build("ring", "reduce_scatter", 4)
    own = placed(ring, programs(ring)[1])
    assert (own.input_chunks, own.output_chunks) == (4, 1)
    assert own.scratch_chunks == 2
    assert {region.buffer for entry in own.actions for region in entry.writes} == {
        "scratch",
        "output",
    }


def test_a_chunk_that_stays_is_copied_from_input_to_output() -> None:
    ring = build("ring", "all_gather", 4)
    own = placed(ring, programs(ring)[2])
    assert own.copies == ((Region("input", 0, 1), Region("output", 2, 1)),)
