"""The program of each rank says what the moves of the collective say, and orders what it must."""

import itertools
import random
from collections import Counter, deque

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, CollectiveBuilder, build_algorithm
from meshwright.policy.collective.rank_program import (
    RankAction,
    RankProgram,
    build_rank_program,
    build_rank_programs,
    expand_slots,
    list_moves,
)
from meshwright.policy.collective.switch_lowering import lower_switches
from tests.policy.collective.counting import inputs, promised
from tests.policy.collective.gallery import gallery, label

GALLERY = list(gallery((3, 4, 8)))


def run(collective: Collective, seed: int) -> dict[tuple[int, int], Counter[tuple[int, int]]]:
    """Carry out programs in a random order that respects `after` and the order of messages."""
    chance = random.Random(seed)
    held = dict(inputs(collective))
    lanes = build_rank_programs(collective)
    done: list[set[int]] = [set() for _ in lanes]
    mail: dict[tuple[int, int, int], deque[list[Counter[tuple[int, int]]]]] = {}
    order = _streams(lanes)
    left = {(own.rank, index) for own in lanes for index in range(len(own.actions))}
    while left:
        moved = False
        for rank, index in chance.sample(sorted(left), len(left)):
            action = lanes[rank].actions[index]
            stream = order.get(_stream(rank, action))
            if not set(action.depends_on) <= done[rank] or (stream and stream[0] != index):
                continue
            link = action.peer, rank, action.channel
            if action.kind.startswith("receive") and not mail.get(link):
                continue
            _carry_out(rank, action, held, mail)
            if stream:
                stream.popleft()
            done[rank].add(index)
            left.remove((rank, index))
            moved = True
        assert moved, "the programs hang"
    return held


def _stream(rank: int, action: RankAction) -> tuple[int, int, int, bool]:
    return rank, action.peer, action.channel, action.kind == "send"


def _streams(lanes: tuple[RankProgram, ...]) -> dict[tuple[int, int, int, bool], deque[int]]:
    order: dict[tuple[int, int, int, bool], deque[int]] = {}
    for own in lanes:
        for index, action in enumerate(own.actions):
            if action.peer != own.rank:
                order.setdefault(_stream(own.rank, action), deque()).append(index)
    return order


def _carry_out(rank: int, action: RankAction, held: dict, mail: dict) -> None:  # type: ignore[type-arg]
    if action.reads:
        message = [held[rank, slot] for slot in expand_slots(action.reads)]
    else:
        message = mail[action.peer, rank, action.channel].popleft()
    if action.kind == "send":
        mail.setdefault((rank, action.peer, action.channel), deque()).append(message)
        return
    for slot, value in zip(expand_slots(action.writes), message, strict=True):
        adds = action.kind in ("add", "receive_add")
        held[rank, slot] = held[rank, slot] + value if adds else value


@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_programs_do_what_the_collective_promises_in_any_order(collective: Collective) -> None:
    plain = lower_switches(collective)
    held = run(plain, seed=collective.ranks)
    assert all(held.get(cell) == value for cell, value in promised(plain).items())


@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_the_moves_of_a_place_are_those_of_the_walk(collective: Collective) -> None:
    walked = Counter(
        (step, *row[:7])
        for step, moves in collective.iterate_steps()
        for row in moves.split_by_slot().table.tolist()
    )
    found: Counter[tuple[int, ...]] = Counter()
    for place in range(collective.num_endpoints):
        steps, table = list_moves(collective, place)
        for step, row in zip(steps.tolist(), table.tolist(), strict=True):
            src, dst, src_slot, dst_slot, count, adds, channel, _ = row
            if src == place:  # each move once, at its sender
                for by in range(count):
                    found[step, src, dst, src_slot + by, dst_slot + by, 1, adds, channel] += 1
    assert found == walked


def test_moves_of_a_step_between_two_ranks_are_one_message() -> None:
    builder = CollectiveBuilder("spread", "broadcast", ranks=2, chunks=5)
    with builder.step():
        for chunk in (4, 0, 1, 2, 3):
            builder.copy(0, 1, chunk=chunk)
    sends, takes = (own.actions for own in build_rank_programs(builder.build()))
    assert [action.reads for action in sends] == [((0, 5),)]
    assert [action.writes for action in takes] == [((0, 5),)]
    assert sends[0].chunks == 5


def test_channels_and_additions_are_messages_of_their_own() -> None:
    builder = CollectiveBuilder("mixed", "reduce", ranks=2, chunks=3, root=1)
    with builder.step():
        builder.add(0, 1, chunk=0)
        builder.add(0, 1, chunk=1, channel=1)
        builder.copy(0, 1, chunk=2)
    kinds = [
        (action.kind, action.channel) for action in build_rank_programs(builder.build())[1].actions
    ]
    assert kinds == [("receive", 0), ("receive_add", 0), ("receive_add", 1)]


def test_an_action_waits_for_what_it_reads_and_for_readers_of_what_it_overwrites() -> None:
    ring = build_rank_program(build_algorithm("ring", "all_reduce", 3), 1)
    kinds = [(action.kind, action.step, action.depends_on) for action in ring.actions]
    assert kinds == [
        ("send", 0, ()),
        ("receive_add", 0, ()),
        ("send", 1, (1,)),  # reads what was added
        ("receive_add", 1, ()),
        ("send", 2, (3,)),
        ("receive", 2, (0,)),  # overwrites what was sent first
        ("send", 3, (5,)),
        ("receive", 3, (2,)),
    ]


def test_a_program_of_one_rank_is_made_without_the_others() -> None:
    large = build_algorithm("ring", "all_reduce", 4096)
    assert len(build_rank_program(large, 17).actions) == 4 * 4095


def test_both_ends_of_a_message_agree_on_its_chunks() -> None:
    for collective in GALLERY:
        sent: Counter[tuple[int, int, int, int, int]] = Counter()
        taken: Counter[tuple[int, int, int, int, int]] = Counter()
        numbers: dict[tuple[int, ...], itertools.count[int]] = {}
        for own in build_rank_programs(lower_switches(collective)):
            for action in own.actions:
                if action.peer == own.rank:
                    continue
                send = action.kind == "send"
                ends = (own.rank, action.peer) if send else (action.peer, own.rank)
                key = (*ends, action.channel)
                number = next(numbers.setdefault((*key, int(send)), itertools.count()))
                (sent if send else taken)[(*key, number, action.chunks)] += 1
        assert sent == taken, label(collective)


def test_a_collective_with_switches_is_refused_until_it_is_hosted() -> None:
    nvls = build_algorithm("nvls", "all_reduce", 4)
    with pytest.raises(InputError, match="lower_switches"):
        build_rank_program(nvls, 0)
    assert build_rank_program(lower_switches(nvls), 0).actions


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="no rank 4"):
        build_rank_program(build_algorithm("ring", "all_reduce", 4), 4)
