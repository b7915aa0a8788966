"""Weights on their way from ranks that train to ranks that serve, as a plan.

    plan = plan_weight_transfer(trainer, engines)  what each rank of either side holds, box by box
    plan.slices                                    what goes from whom to whom, in which format
    plan.make_buckets()                            the same as messages

Every element reaches every rank that wants it exactly once. What several ranks could send is sent
by one that stands where it is wanted, or else in the same node, or else has least to send so far.
Formats are part of the plan: numbers are rounded before they travel where that makes them fewer
bytes, and after it where it makes them more. Both sides make the plan from the same values and get
the same one.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.tensor_box import TensorBox, intersect_boxes, split_disjoint
from meshwright.spec.name_suggestions import build_unknown_name_problem

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8-rows": 1}
"""Bytes of an element in each format; `fp8-rows` is e4m3 with an fp32 scale for each row."""
FP8_ROWWISE = "fp8-rows"
_SCALE_BYTES = 4
ALIGNMENT = 16
"""Bytes at whose multiples slices of a parcel begin."""
BUCKET_BYTES = 64 << 20
"""Where a parcel is full, unless told: long enough for the full speed of any link."""

FanOut = Literal["direct", "broadcast"]
"""Whether each target is sent its own copy, or one message goes to all who want the same."""


class RankShards(NamedTuple):
    """What one rank holds, or wants, of a tensor."""

    formats: tuple[str, ...]
    """How it is kept; where numbers are rounded more than once, all formats in turn."""
    global_shape: tuple[int, ...]
    """Shape of the whole."""
    boxes: tuple[TensorBox, ...]
    """Its parts without gaps; none of them overlap."""


ShardsByTensor = Mapping[str, RankShards]
"""What one rank holds, by the names of tensors."""


class TensorSlice(msgspec.Struct, frozen=True):
    """A box of one tensor on its way."""

    tensor_name: str
    box: TensorBox
    source: int
    """Rank that sends it, counted among those that train."""
    targets: tuple[int, ...]
    """Ranks that get it, counted among those that serve."""
    formats: tuple[str, ...]
    """Formats that its numbers take on, from the source's to the target's."""
    wire_format: str
    """The one of them in which they travel."""

    @property
    def size_bytes(self) -> int:
        """What travels to each target."""
        return compute_wire_bytes(self.box, self.wire_format)

    @property
    def source_casts(self) -> tuple[str, ...]:
        """Formats that the source takes it through, its own first."""
        return self.formats[: self.formats.index(self.wire_format) + 1]

    @property
    def target_casts(self) -> tuple[str, ...]:
        """Formats that the target takes it through, that of the wire first."""
        return self.formats[self.formats.index(self.wire_format) :]


class WeightBucket(msgspec.Struct, frozen=True):
    """Slices that travel together."""

    index: int
    source: int
    targets: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    byte_offsets: tuple[int, ...]
    """The byte at which each begins."""
    size_bytes: int


class WeightTransferPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that has to go, and between whom."""

    slices: tuple[TensorSlice, ...]
    source_devices: tuple[int, ...]
    """Process, and GPU of the cluster, of each rank that trains."""
    target_devices: tuple[int, ...]
    """The same of each rank that serves."""

    def is_local(self, sent: TensorSlice | WeightBucket) -> bool:
        """Tell whether something stays where it is."""
        return all(
            self.target_devices[to] == self.source_devices[sent.source] for to in sent.targets
        )

    @property
    def moved_bytes(self) -> int:
        """What arrives at other seats than it came from, summed over all targets."""
        return sum(
            each.size_bytes * len(each.targets) for each in self.slices if not self.is_local(each)
        )

    def sent_bytes(self) -> list[int]:
        """Return what each source sends to other seats; a broadcast counts once."""
        found = [0] * len(self.source_devices)
        for each in self.slices:
            found[each.source] += 0 if self.is_local(each) else each.size_bytes
        return found

    def received_bytes(self) -> list[int]:
        """Return what each target gets from other seats."""
        found = [0] * len(self.target_devices)
        for each in self.slices:
            for to in () if self.is_local(each) else each.targets:
                found[to] += each.size_bytes
        return found

    def make_buckets(self, most_bytes: int = BUCKET_BYTES) -> tuple[WeightBucket, ...]:
        """Return messages of about `most_bytes`, in the order of the tensors."""
        open_: dict[tuple[int, tuple[int, ...]], list[TensorSlice]] = {}
        full: list[list[TensorSlice]] = []
        sizes: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for each in self.slices:
            key = (each.source, each.targets)
            if sizes[key] and sizes[key] + each.size_bytes > most_bytes:
                full.append(open_.pop(key))
                sizes[key] = 0
            open_.setdefault(key, []).append(each)
            sizes[key] += _aligned(each.size_bytes)
        return tuple(_parcel(number, each) for number, each in enumerate([*full, *open_.values()]))

    def schedule_buckets(self, most_bytes: int = BUCKET_BYTES) -> list[list[WeightBucket]]:
        """Return the parcels in turns: in each of them a source sends one at most."""
        turns: list[list[WeightBucket]] = []
        sent: Counter[int] = Counter()
        for parcel in self.make_buckets(most_bytes):
            turn = sent[parcel.source]
            sent[parcel.source] += 1
            if turn == len(turns):
                turns.append([])
            turns[turn].append(parcel)
        return turns

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits that only the same plan has."""
        code = hashlib.sha256(msgspec.msgpack.encode(self)).digest()
        return int.from_bytes(code[:8], "little") >> 1


def plan_weight_transfer(
    sources: Sequence[ShardsByTensor],
    targets: Sequence[ShardsByTensor],
    *,
    source_seats: Sequence[int] | None = None,
    target_seats: Sequence[int] | None = None,
    nodes: Sequence[int] | None = None,
    fan: FanOut = "direct",
) -> WeightTransferPlan:
    """Return how everything that targets want comes to them.

    A seat is a process and its GPU; ranks of both sides on one seat share them. Left out, sources
    have the first seats and targets those behind them. `nodes` is the node of every seat, by
    number; left out, all are in one.

    Raises:
        InputError: where sources lack something, or have it in another shape.
    """
    at = tuple(range(len(sources)) if source_seats is None else source_seats)
    behind = range(len(sources), len(sources) + len(targets))
    to = tuple(behind if target_seats is None else target_seats)
    seats = {"source_seats": (at, len(sources)), "target_seats": (to, len(targets))}
    _check(seats, nodes, fan)
    chooser = _Chooser(at, to, nodes, fan)
    found: list[_Wanted] = []
    problems: list[Problem] = []
    for name in dict.fromkeys(name for each in targets for name in each):
        having = {rank: each[name] for rank, each in enumerate(sources) if name in each}
        wanting = {rank: each[name] for rank, each in enumerate(targets) if name in each}
        if wrong := _unfit(name, having, wanting):
            problems.append(wrong)
            continue
        pieces, missing = _wanted(name, having, wanting)
        found += pieces
        problems += missing
    if problems:
        raise InputError(problems)
    chosen: dict[int, list[TensorSlice]] = {}
    # The largest first, so that small ones make the loads equal.
    for number in sorted(range(len(found)), key=lambda each: -found[each].size):
        chosen[number] = list(chooser(found[number]))
    slices = tuple(each for number in range(len(found)) for each in chosen[number])
    return WeightTransferPlan(slices=slices, source_devices=at, target_devices=to)


def compute_wire_bytes(box: TensorBox, format_: str) -> int:
    """Return the bytes of a box in a format."""
    scales = box.sizes[0] * _SCALE_BYTES if format_ == FP8_ROWWISE else 0
    return box.num_elements * ELEMENT_BYTES[format_] + scales


class _Wanted(NamedTuple):
    """A box that some targets want in the same format, and who could send it."""

    tensor: str
    box: TensorBox
    holders: tuple[int, ...]
    targets: tuple[int, ...]
    path: tuple[str, ...]
    wire: str

    @property
    def size(self) -> int:
        return compute_wire_bytes(self.box, self.wire)


class _Chooser:
    """Decides who sends what, remembering what each has to send."""

    def __init__(
        self, at: tuple[int, ...], to: tuple[int, ...], nodes: Sequence[int] | None, fan: FanOut
    ) -> None:
        self._at, self._to, self._fan = at, to, fan
        self._nodes = nodes
        self._sent = [0] * len(at)

    def __call__(self, wanted: _Wanted) -> Iterator[TensorSlice]:
        seats = {self._at[rank]: rank for rank in reversed(wanted.holders)}
        away = [each for each in wanted.targets if self._to[each] not in seats]
        for target in wanted.targets:
            if self._to[target] in seats:
                yield _slice(wanted, seats[self._to[target]], (target,))
        for some in [tuple(away)] if self._fan == "broadcast" and away else [(to,) for to in away]:
            source = min(
                wanted.holders, key=lambda rank: (self._far(rank, some), self._sent[rank], rank)
            )
            self._sent[source] += wanted.size
            yield _slice(wanted, source, some)

    def _far(self, source: int, targets: Sequence[int]) -> int:
        """Count the targets in other nodes."""
        if self._nodes is None:
            return 0
        mine = self._nodes[self._at[source]]
        return sum(self._nodes[self._to[each]] != mine for each in targets)


def _slice(wanted: _Wanted, source: int, targets: tuple[int, ...]) -> TensorSlice:
    return TensorSlice(wanted.tensor, wanted.box, source, targets, wanted.path, wanted.wire)


def _wanted(
    name: str, having: Mapping[int, RankShards], wanting: Mapping[int, RankShards]
) -> tuple[list[_Wanted], list[Problem]]:
    """Cut what is wanted of a tensor along what is held; say what of it nobody holds."""
    holders = _ranks_by_box(having)
    pieces = {
        piece: tuple(
            sorted({rank for box in holders if box.contains(piece) for rank in holders[box]})
        )
        for piece, _ in split_disjoint(holders)
    }
    problems: list[Problem] = []
    found: dict[tuple[TensorBox, tuple[str, ...], str], list[int]] = {}
    own: dict[TensorBox, TensorBox] = {}
    cuts: dict[TensorBox, list[TensorBox]] = {}
    for box in _ranks_by_box(wanting):
        cuts[box] = []
        for piece in pieces:
            if (shared := intersect_boxes(piece, box)) is not None:
                cuts[box].append(shared)
                own[shared] = piece
        held = sum(each.num_elements for each in cuts[box])
        if held != box.num_elements:
            what = (
                f"{box.num_elements - held:,} of {box.num_elements:,} elements are held by no "
                f"source"
            )
            problems.append(Problem(name, what, "let all ranks that train take part"))
    formats = next(iter(having.values())).formats
    for rank, want in wanting.items():
        path = tuple(dict.fromkeys((formats[-1], *want.formats)))
        wire = _wire(path, want, [cut for box in want.boxes for cut in cuts[box]])
        for cut in (each for box in want.boxes for each in cuts[box]):
            found.setdefault((cut, path, wire), []).append(rank)
    made = [
        _Wanted(name, cut, pieces[own[cut]], tuple(ranks), path, wire)
        for (cut, path, wire), ranks in found.items()
    ]
    return made, problems


def _wire(path: tuple[str, ...], want: RankShards, cuts: Sequence[TensorBox]) -> str:
    """Choose the format with the fewest bytes; scales of rows need the rows that the target has."""
    columns = {(box.offsets[1:], box.sizes[1:]) for box in want.boxes}
    whole_rows = len(columns) == 1 and all(
        (cut.offsets[1:], cut.sizes[1:]) in columns for cut in cuts
    )
    allowed = [each for each in path if each != FP8_ROWWISE or whole_rows]
    return min(allowed, key=lambda each: ELEMENT_BYTES[each])


def _ranks_by_box(held: Mapping[int, RankShards]) -> dict[TensorBox, list[int]]:
    found: dict[TensorBox, list[int]] = {}
    for rank, each in held.items():
        for box in each.boxes:
            if box.num_elements:
                found.setdefault(box, []).append(rank)
    return found


def _unfit(
    name: str, having: Mapping[int, RankShards], wanting: Mapping[int, RankShards]
) -> Problem | None:
    """Say why a tensor cannot be sent."""
    if not having:
        return Problem(name, "no source has such a tensor", "train and serve the same model")
    first = next(iter(having.values()))
    for side, ranks in (("source", having), ("target", wanting)):
        for rank, each in ranks.items():
            if each.global_shape != first.global_shape:
                what = (
                    f"{side} {rank} has it as {list(each.global_shape)}, not "
                    f"{list(first.global_shape)}"
                )
                return Problem(name, what, "train and serve the same model")
            for format_ in each.formats:
                if format_ not in ELEMENT_BYTES:
                    return build_unknown_name_problem("format", format_, ELEMENT_BYTES, name)
    odd = [rank for rank, each in having.items() if each.formats != first.formats]
    if odd or FP8_ROWWISE in first.formats:
        what = f"source {odd[0]} keeps it in another format" if odd else "sources keep it as fp8"
        return Problem(name, what, "send from one format: fp32, bf16 or fp16")
    return None


def _check(
    given: Mapping[str, tuple[tuple[int, ...], int]], nodes: Sequence[int] | None, fan: str
) -> None:
    problems = []
    for where, (seats, ranks) in given.items():
        if len(seats) != ranks or len(set(seats)) != ranks:
            what = f"{list(seats)} for {ranks} ranks"
            problems.append(Problem(where, what, "give every rank a seat of its own"))
    last = max((seat for seats, _ in given.values() for seat in seats), default=0)
    if nodes is not None and last >= len(nodes):
        problems.append(Problem("nodes", f"seat {last} has none", "give that of every seat"))
    if fan not in ("direct", "broadcast"):
        problems.append(build_unknown_name_problem("fan", fan, ("direct", "broadcast"), "fan"))
    if problems:
        raise InputError(problems)


def _parcel(number: int, slices: Sequence[TensorSlice]) -> WeightBucket:
    starts, at = [], 0
    for each in slices:
        starts.append(at)
        at += _aligned(each.size_bytes)
    return WeightBucket(
        number, slices[0].source, slices[0].targets, tuple(slices), tuple(starts), at
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
