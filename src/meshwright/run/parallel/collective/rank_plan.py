"""Which chunk of the message every action carries: slots say where, not what.

Only chunks have a size, and both ends of a message must agree on it; what passes through scratch
slots is followed from step to step here.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from meshwright.policy.collective.collective import Collective, Ints
from meshwright.policy.collective.contract import build_contract
from meshwright.policy.collective.rank_program import (
    RankAction,
    RankProgram,
    build_rank_program,
    expand_slots,
)
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout, ElementRun, SlotMap
from meshwright.run.parallel.collective.progress_table import PlanPosition


def list_chunks_by_action(
    collective: Collective, program: RankProgram
) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each action of a program, in the order of the message."""
    held = _held(collective)
    carried: list[tuple[int, ...]] = []
    waiting = iter(enumerate(program.actions))
    number, action = next(waiting, (None, None))
    for step, moves in collective.iterate_steps():
        if action is None:
            break
        before = held[program.rank].copy() if action.step == step else None
        flat = moves.split_by_slot()
        held[flat.dst, flat.dst_slot] = held[flat.src, flat.src_slot]
        while action is not None and action.step == step:
            assert before is not None
            after = held[program.rank]
            row, spans = (before, action.reads) if action.reads else (after, action.writes)
            carried.append(tuple(int(row[slot]) for slot in expand_slots(spans)))
            number, action = next(waiting, (None, None))
    assert number is None, "the program has steps that the collective has not"
    return tuple(carried)


def _held(collective: Collective) -> Ints:
    """Return the chunk that lies in each slot at the start; 0 where none does."""
    held = np.zeros((collective.num_endpoints, collective.slots), dtype=np.int32)
    given = build_contract(collective).inputs
    held[given[:, 0], given[:, 1]] = given[:, 3]
    return held


TaskKind = Literal["receive", "local", "send"]

_KINDS: tuple[TaskKind, ...] = ("receive", "local", "send")
"""In the order they are begun: a receive can be announced before its turn to be used."""


class FrameTask(NamedTuple):
    """One frame that a rank sends or takes, or moves within its own tensors."""

    step: int
    kind: TaskKind
    peer: int
    channel: int
    first_chunk: int
    """The first chunk of the message in it."""
    first_slot: int
    """The first slot that is read, or written by a receive."""
    num_chunks: int
    """Chunks in it, whole or in part."""
    reduces: bool
    """Whether it is added to what lies where it arrives."""
    reads: tuple[ElementRun, ...]
    """Where a send or a local task takes its elements from."""
    writes: tuple[ElementRun, ...]
    """Where a receive or a local task puts them."""
    bases: tuple[ElementRun, ...]
    """What they are added to; the same as `writes`, but for the first write out of place."""
    num_elements: int
    """Elements in the frame."""
    dependencies: tuple[int, ...]
    """Earlier tasks that must be over before this one begins."""
    batch_key: tuple[int, int]
    """Its step, and the number of the frame in its message."""

    @property
    def position(self) -> PlanPosition:
        """The task as people name it."""
        return PlanPosition(self.step, self.first_chunk, self.kind, self.peer)


class RankPlan(NamedTuple):
    """What one rank does with tensors of one size."""

    rank: int
    tasks: tuple[FrameTask, ...]
    workspace_elements: int
    """Elements needed beside the tensors."""
    dependency_counts: tuple[int, ...]
    """How many tasks each task waits for."""
    dependents: tuple[tuple[int, ...], ...]
    """Which tasks wait for each task."""
    sends_by_peer: tuple[tuple[int, list[int]], ...]
    """Peers that frames are sent to, and those tasks in order."""
    receives_by_peer: tuple[tuple[int, list[int]], ...]
    """Peers that frames come from, and those tasks in order."""
    local_tasks: tuple[int, ...]
    """Tasks that need no peer."""


class _Piece(NamedTuple):
    order: tuple[int, int, int, int, int, int]
    action: RankAction
    chunk: int
    slots: tuple[tuple[int, int, int, int], ...]
    """Per slot: its place in the message, and the start, end and number of the piece."""


def make_rank_plan(
    collective: Collective, rank: int, elements: int, *, frame: int, in_place: bool
) -> RankPlan:
    """Return the plan of a rank; `elements` as in `ChunkLayout`, at most `frame` a frame."""
    own = build_rank_program(collective, rank)
    parts = list_chunks_by_action(collective, own)
    cuts = ChunkLayout(collective, elements)
    pieces = [
        piece
        for action, chunks in zip(own.actions, parts, strict=True)
        for piece in _pieces(action, chunks, cuts, frame)
    ]
    pieces.sort(key=lambda piece: piece.order)
    homes = SlotMap(collective, rank, cuts, in_place=in_place)
    steady = _steady_slots(own.actions, parts, cuts)
    order = _Order(steady)
    tasks = [_task(piece, homes, order) for piece in pieces]
    tasks += [
        _keeping(rank, slot, source, target, order)
        for slot, source, target in homes.iter_retained_slots()
    ]
    return _arranged(rank, tasks, homes.workspace_elements)


def _arranged(rank: int, tasks: list[FrameTask], workspace: int) -> RankPlan:
    followers: list[list[int]] = [[] for _ in tasks]
    lanes: dict[str, dict[int, list[int]]] = {kind: {} for kind in _KINDS}
    for number, task in enumerate(tasks):
        for before in task.dependencies:
            followers[before].append(number)
        lanes[task.kind].setdefault(task.peer, []).append(number)
    return RankPlan(
        rank=rank,
        tasks=tuple(tasks),
        workspace_elements=workspace,
        dependency_counts=tuple(len(task.dependencies) for task in tasks),
        dependents=tuple(map(tuple, followers)),
        sends_by_peer=tuple(lanes["send"].items()),
        receives_by_peer=tuple(lanes["receive"].items()),
        local_tasks=tuple(lanes["local"].get(rank, ())),
    )


def _pieces(
    action: RankAction, chunks: tuple[int, ...], cuts: ChunkLayout, frame: int
) -> Iterator[_Piece]:
    """Cut a message into frames; both ends see the same chunks, so they cut alike."""
    kind = "local" if action.kind in ("copy", "add") else action.kind.partition("_")[0]
    rank_of_kind = ("receive", "local", "send").index(kind)
    frames: list[list[tuple[int, int, int, int]]] = []
    room = 0
    for index, chunk in enumerate(chunks):
        length = cuts.get_chunk_elements(chunk)
        if not length:
            continue
        count = -(-length // frame)
        edges = [number * length // count for number in range(count + 1)]
        for number in range(count):
            size = edges[number + 1] - edges[number]
            if size > room or count > 1:
                frames.append([])
                room = frame if count == 1 else 0
            frames[-1].append((index, edges[number], edges[number + 1], number))
            room -= min(room, size)
    for number, slots in enumerate(frames):
        order = (action.step, number, rank_of_kind, action.peer, action.channel, int(action.adds))
        yield _Piece(order, action, chunks[slots[0][0]], tuple(slots))


def _steady_slots(
    actions: tuple[RankAction, ...], parts: tuple[tuple[int, ...], ...], cuts: ChunkLayout
) -> set[int]:
    """Return the slots that only ever hold chunks of one length, whose pieces are comparable."""
    lengths: dict[int, set[int]] = {}
    for action, chunks in zip(actions, parts, strict=True):
        for spans in (action.reads, action.writes):
            for slot, chunk in zip(expand_slots(spans), chunks, strict=False):
                lengths.setdefault(slot, set()).add(cuts.get_chunk_elements(chunk))
    return {slot for slot, seen in lengths.items() if len(seen) == 1}


def _task(piece: _Piece, homes: SlotMap, order: "_Order") -> FrameTask:
    action = piece.action
    kind = _KINDS[piece.order[2]]
    reads, writes = expand_slots(action.reads), expand_slots(action.writes)
    taken = [(reads[index], number) for index, _, _, number in piece.slots] if reads else []
    put = [(writes[index], number) for index, _, _, number in piece.slots] if writes else []
    sources = [
        homes.locate_read(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(taken, piece.slots, strict=bool(taken))
    ]
    bases = [
        homes.locate_read(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(put, piece.slots, strict=bool(put))
        if action.adds
    ]
    targets = [
        homes.locate_write(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(put, piece.slots, strict=bool(put))
    ]
    joined = _joined([column for column in (sources, targets, bases) if column])
    columns = iter(joined)
    return FrameTask(
        step=action.step,
        kind=kind,
        peer=action.peer,
        channel=action.channel,
        first_chunk=piece.chunk,
        first_slot=(taken or put)[0][0],
        reduces=action.adds,
        num_chunks=len(piece.slots),
        reads=next(columns) if sources else (),
        writes=next(columns) if targets else (),
        bases=next(columns) if bases else (),
        num_elements=sum(end - begin for _, begin, end, _ in piece.slots),
        dependencies=order.take(taken, put),
        batch_key=piece.order[:2],
    )


def _keeping(
    rank: int, slot: int, source: ElementRun, target: ElementRun, order: "_Order"
) -> FrameTask:
    """Return the copy of what a rank gave to its own output."""
    return FrameTask(
        step=-1,
        kind="local",
        peer=rank,
        channel=0,
        first_chunk=slot,
        first_slot=slot,
        reduces=False,
        num_chunks=1,
        reads=(source,),
        writes=(target,),
        bases=(),
        num_elements=source.length,
        dependencies=order.take([], [(slot, 0)]),
        batch_key=(-1, 0),
    )


def _joined(columns: list[list[ElementRun]]) -> list[tuple[ElementRun, ...]]:
    """Join runs that follow each other in every column."""
    rows: list[list[ElementRun]] = []
    for row in zip(*columns, strict=True):
        if rows and all(
            last.tensor == now.tensor and last.start + last.length == now.start
            for last, now in zip(rows[-1], row, strict=True)
        ):
            rows[-1] = [
                ElementRun(last.tensor, last.start, last.length + now.length)
                for last, now in zip(rows[-1], row, strict=True)
            ]
        else:
            rows.append(list(row))
    return [tuple(column) for column in zip(*rows, strict=True)]


class _Order:
    """Remembers who wrote and who read each piece, to say what a task has to wait for."""

    def __init__(self, steady: set[int]) -> None:
        self._steady = steady
        self._tasks = 0
        self._writers: dict[tuple[int, int], list[int]] = {}
        self._readers: dict[tuple[int, int], list[int]] = {}

    def take(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> tuple[int, ...]:
        """Count one more task; return those before it that it depends on."""
        number, waits = self._tasks, set[int]()
        self._tasks += 1
        for key in map(self._key, reads):
            waits.update(self._writers.get(key, ()))
            self._readers.setdefault(key, []).append(number)
        for key in map(self._key, writes):
            waits.update(self._readers.pop(key, ()))
            waits.update(self._writers.get(key, ()))
            self._writers[key] = [number]
        return tuple(sorted(waits - {number}))

    def _key(self, piece: tuple[int, int]) -> tuple[int, int]:
        slot, number = piece
        return (slot, number) if slot in self._steady else (slot, 0)
