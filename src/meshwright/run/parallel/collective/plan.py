"""`plan`: the program of one rank, cut into frames that lie in real tensors.

A *task* moves one frame: at most so many elements of a message, so that long chunks stream. Tasks
wait for each other slot by slot and piece by piece, so a piece travels on while the next arrives.
Both ends of a message cut it alike. Knows tensors only by number (see `homes`).
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.lanes import Action, program, slots_of
from meshwright.run.parallel.collective.cuts import Cuts
from meshwright.run.parallel.collective.homes import Homes, Run
from meshwright.run.parallel.collective.ledger import Spot
from meshwright.run.parallel.collective.parts import parts_carried

TaskKind = Literal["receive", "local", "send"]
_KINDS: tuple[TaskKind, ...] = ("receive", "local", "send")
"""In the order they are begun: a receive can be announced before its turn to be used."""


class Task(NamedTuple):
    """One frame that a rank sends or takes, or moves within its own tensors."""

    step: int
    kind: TaskKind
    peer: int
    channel: int
    chunk: int
    """The first chunk of the message in it."""
    slot: int
    """The first slot that is read, or written by a receive."""
    chunks: int
    """Chunks in it, whole or in part."""
    adds: bool
    """Whether it is added to what lies where it arrives."""
    reads: tuple[Run, ...]
    """Where a send or a local task takes its elements from."""
    writes: tuple[Run, ...]
    """Where a receive or a local task puts them."""
    bases: tuple[Run, ...]
    """What they are added to; the same as `writes`, but for the first write out of place."""
    length: int
    """Elements in the frame."""
    waits: tuple[int, ...]
    """Earlier tasks that must be over before this one begins."""
    batch: tuple[int, int]
    """Its step, and the number of the frame in its message."""

    @property
    def spot(self) -> Spot:
        """The task as people name it."""
        return Spot(self.step, self.chunk, self.kind, self.peer)


class Plan(NamedTuple):
    """What one rank does with tensors of one size."""

    rank: int
    tasks: tuple[Task, ...]
    workspace: int
    """Elements needed beside the tensors."""
    waits: tuple[int, ...]
    """How many tasks each task waits for."""
    followers: tuple[tuple[int, ...], ...]
    """Which tasks wait for each task."""
    outgoing: tuple[tuple[int, list[int]], ...]
    """Peers that frames are sent to, and those tasks in order."""
    incoming: tuple[tuple[int, list[int]], ...]
    """Peers that frames come from, and those tasks in order."""
    inside: tuple[int, ...]
    """Tasks that need no peer."""


class _Piece(NamedTuple):
    order: tuple[int, int, int, int, int, int]
    action: Action
    chunk: int
    slots: tuple[tuple[int, int, int, int], ...]
    """Per slot: its place in the message, and the start, end and number of the piece."""


def plan(collective: Collective, rank: int, elements: int, *, frame: int, in_place: bool) -> Plan:
    """Return the plan of a rank; `elements` as in `Cuts`, frames of at most `frame` elements."""
    own = program(collective, rank)
    parts = parts_carried(collective, own)
    cuts = Cuts(collective, elements)
    pieces = [
        piece
        for action, chunks in zip(own.actions, parts, strict=True)
        for piece in _pieces(action, chunks, cuts, frame)
    ]
    pieces.sort(key=lambda piece: piece.order)
    homes = Homes(collective, rank, cuts, in_place=in_place)
    steady = _steady_slots(own.actions, parts, cuts)
    order = _Order(steady)
    tasks = [_task(piece, homes, order) for piece in pieces]
    tasks += [_keeping(rank, slot, source, target, order) for slot, source, target in homes.kept()]
    return _arranged(rank, tasks, homes.workspace)


def _arranged(rank: int, tasks: list[Task], workspace: int) -> Plan:
    followers: list[list[int]] = [[] for _ in tasks]
    lanes: dict[str, dict[int, list[int]]] = {kind: {} for kind in _KINDS}
    for number, task in enumerate(tasks):
        for before in task.waits:
            followers[before].append(number)
        lanes[task.kind].setdefault(task.peer, []).append(number)
    return Plan(
        rank=rank,
        tasks=tuple(tasks),
        workspace=workspace,
        waits=tuple(len(task.waits) for task in tasks),
        followers=tuple(map(tuple, followers)),
        outgoing=tuple(lanes["send"].items()),
        incoming=tuple(lanes["receive"].items()),
        inside=tuple(lanes["local"].get(rank, ())),
    )


def _pieces(action: Action, chunks: tuple[int, ...], cuts: Cuts, frame: int) -> Iterator[_Piece]:
    """Cut a message into frames; both ends see the same chunks, so they cut alike."""
    kind = "local" if action.kind in ("copy", "add") else action.kind.partition("_")[0]
    rank_of_kind = ("receive", "local", "send").index(kind)
    frames: list[list[tuple[int, int, int, int]]] = []
    room = 0
    for index, chunk in enumerate(chunks):
        length = cuts.length(chunk)
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
    actions: tuple[Action, ...], parts: tuple[tuple[int, ...], ...], cuts: Cuts
) -> set[int]:
    """Return the slots that only ever hold chunks of one length, whose pieces are comparable."""
    lengths: dict[int, set[int]] = {}
    for action, chunks in zip(actions, parts, strict=True):
        for spans in (action.reads, action.writes):
            for slot, chunk in zip(slots_of(spans), chunks, strict=False):
                lengths.setdefault(slot, set()).add(cuts.length(chunk))
    return {slot for slot, seen in lengths.items() if len(seen) == 1}


def _task(piece: _Piece, homes: Homes, order: "_Order") -> Task:
    action = piece.action
    kind = _KINDS[piece.order[2]]
    reads, writes = slots_of(action.reads), slots_of(action.writes)
    taken = [(reads[index], number) for index, _, _, number in piece.slots] if reads else []
    put = [(writes[index], number) for index, _, _, number in piece.slots] if writes else []
    sources = [
        homes.read(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(taken, piece.slots, strict=bool(taken))
    ]
    bases = [
        homes.read(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(put, piece.slots, strict=bool(put))
        if action.adds
    ]
    targets = [
        homes.write(slot, action.step, begin, end)
        for (slot, _), (_, begin, end, _) in zip(put, piece.slots, strict=bool(put))
    ]
    joined = _joined([column for column in (sources, targets, bases) if column])
    columns = iter(joined)
    return Task(
        step=action.step,
        kind=kind,
        peer=action.peer,
        channel=action.channel,
        chunk=piece.chunk,
        slot=(taken or put)[0][0],
        adds=action.adds,
        chunks=len(piece.slots),
        reads=next(columns) if sources else (),
        writes=next(columns) if targets else (),
        bases=next(columns) if bases else (),
        length=sum(end - begin for _, begin, end, _ in piece.slots),
        waits=order.take(taken, put),
        batch=piece.order[:2],
    )


def _keeping(rank: int, slot: int, source: Run, target: Run, order: "_Order") -> Task:
    """Return the copy of what a rank gave to its own output."""
    return Task(
        step=-1,
        kind="local",
        peer=rank,
        channel=0,
        chunk=slot,
        slot=slot,
        adds=False,
        chunks=1,
        reads=(source,),
        writes=(target,),
        bases=(),
        length=source.length,
        waits=order.take([], [(slot, 0)]),
        batch=(-1, 0),
    )


def _joined(columns: list[list[Run]]) -> list[tuple[Run, ...]]:
    """Join runs that follow each other in every column."""
    rows: list[list[Run]] = []
    for row in zip(*columns, strict=True):
        if rows and all(
            last.tensor == now.tensor and last.start + last.length == now.start
            for last, now in zip(rows[-1], row, strict=True)
        ):
            rows[-1] = [
                Run(last.tensor, last.start, last.length + now.length)
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
