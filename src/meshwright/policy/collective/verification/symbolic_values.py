"""`SymbolicValues`: the value in every slot while a collective runs, as sums of inputs.

Inputs have the first numbers, `rank · width + slot`; every sum of two values gets the next one. The
same two values added in the same step are one value, wherever that happens. What arrives together
in a switch is added in any order, so the sum of three values or more is one of its own there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Problem
from meshwright.policy.collective.collective import Collective, Ints
from meshwright.policy.collective.contract import inputs_per_rank, list_input_slots
from meshwright.policy.collective.verification.slot_access import Numbers, SlotAccess

NO_VALUE = -1
_MOST_NUMBERS = (1 << 31) - 1
"""Cells and values are numbered with 32 bits."""


def find_value_count_problems(collective: Collective) -> list[Problem]:
    """Return what a collective has too many of to be numbered."""
    cells = collective.num_endpoints * collective.slots
    values = collective.ranks * inputs_per_rank(collective) + _most_sums(collective)
    fix = "use fewer ranks, channels or pieces: a proof numbers them with 32 bits"
    return [
        Problem(where, f"{many:,} {what} are more than can be told apart", fix)
        for where, many, what in (("slots", cells, "slots"), ("sweeps", values, "values"))
        if many > _MOST_NUMBERS
    ]


def _most_sums(collective: Collective) -> int:
    return sum(
        sweep.span * int(sweep.moves.count[sweep.moves.adds != 0].sum(dtype=np.int64))
        for sweep in collective.sweeps
    )


class _Sums(NamedTuple):
    """Sums with numbers in a row: value = low + high."""

    first: int
    low: Ints
    high: Ints
    apart: bool
    """Whether none of the values occurs in two of the sums."""


class SymbolicValues:
    """The values in every slot."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        slots, self.width = collective.slots, inputs_per_rank(collective)
        self.num_inputs = collective.ranks * self.width
        self.num_values = self.num_inputs
        """Values so far."""
        self.slot_values = np.full(collective.num_endpoints * slots, NO_VALUE, dtype=np.int32)
        for rank in range(collective.ranks):
            own = list_input_slots(collective, rank)
            if len(own):
                begin = rank * slots + own.start
                inputs = np.arange(own.start, own.stop, dtype=np.int32)
                self.slot_values[begin : begin + len(own)] = rank * self.width + inputs
        sums = _most_sums(collective)
        # Which part of the message a value is: different parts must not be added to each other.
        self.chunk_of_value = np.empty(self.num_inputs + sums if sums else 0, dtype=np.int32)
        if sums:
            each = self.chunk_of_value[: self.num_inputs].reshape(collective.ranks, self.width)
            each[:] = np.arange(self.width, dtype=np.int32)
        self._row_of_part = np.zeros(self.width, dtype=np.int32)
        self._row_of_value = np.zeros(len(self.chunk_of_value), dtype=np.int32)
        self._sums: list[_Sums] = []

    def apply_step(self, step: int, cells: SlotAccess) -> Problem | None:
        """Carry out one step, or say why it cannot be."""
        incoming = self.slot_values[cells.reads]
        if incoming.min() < 0:
            row, offset = cells.get_origin(int(np.argmin(incoming)))
            moves = cells.moves
            target, slot = self._name(moves.dst[row]), moves.src_slot[row] + offset
            what = f"sends slot {slot} to {target}, but the slot holds nothing yet"
            return Problem(self._at(step, moves.src[row]), what)
        adding = cells.list_reductions()
        if adding is None:
            return self._add(step, cells, np.arange(len(incoming)), incoming)
        if len(adding):
            problem = self._add(step, cells, adding, incoming[adding])
            if problem is not None:
                return problem
            plain = np.ones(len(incoming), dtype=bool)
            plain[adding] = False
            self.slot_values[cells.writes[plain]] = incoming[plain]
        else:
            self.slot_values[cells.writes] = incoming
        return None

    def _add(
        self, step: int, cells: SlotAccess, entries: Numbers, incoming: Ints
    ) -> Problem | None:
        targets = cells.writes[entries]
        switches = self.collective.ranks * self.collective.slots
        networked = targets.max() >= switches
        crowded = self._crowded(targets, switches) if networked else None
        for wave in _waves(targets) if networked else [slice(None)]:
            now, values = targets[wave], incoming[wave]
            apart = None if crowded is None else crowded[wave]
            resting = self.slot_values[now]
            if resting.min() < 0:
                # The first value to come to a switch is the sum so far.
                empty = resting < 0
                if now[empty].min() < switches:
                    entry = entries[wave][int(np.argmax(empty & (now < switches)))]
                    row, offset = cells.get_origin(int(entry))
                    slot = cells.moves.dst_slot[row] + offset
                    what = f"adds to slot {slot}, which holds nothing yet"
                    return Problem(self._at(step, cells.moves.dst[row]), what, "copy there first")
                self.slot_values[now[empty]] = values[empty]
                now, resting, values = now[~empty], resting[~empty], values[~empty]
                if not len(now):
                    continue
                apart = None if apart is None else apart[~empty]
            parts = self.chunk_of_value[resting]
            mixed = parts != self.chunk_of_value[values]
            if mixed.any():
                return self._mixed(step, cells, int(now[int(np.argmax(mixed))]))
            if apart is None or not apart.any():
                self.slot_values[now] = self._sum(resting, values, parts)
                continue
            for some, own in ((~apart, False), (apart, True)):
                if some.any():
                    sums = self._sum(resting[some], values[some], parts[some], own=own)
                    self.slot_values[now[some]] = sums
        return None

    def _crowded(self, targets: Numbers, switches: int) -> NDArray[np.bool_]:
        """Return which entries belong to a sum of three values or more in a switch."""
        _, which, arriving = np.unique(targets, return_inverse=True, return_counts=True)
        values = arriving[which] + (self.slot_values[targets] != NO_VALUE)
        return np.asarray((targets >= switches) & (values > 2))

    def _sum(self, resting: Ints, incoming: Ints, parts: Ints, *, own: bool = False) -> Ints:
        """Return the numbers of sums; equal ones get one number, unless each is to have its own."""
        low, high = np.minimum(resting, incoming), np.maximum(resting, incoming)
        rows = np.arange(len(low), dtype=np.int32)
        # Equal sums have equal parts and equal low values. Where nothing occurs twice among those
        # (told by who comes last), all sums differ and need not be sorted.
        apart = _last_is_own(self._row_of_part, parts, rows)
        if not own and not apart and not _last_is_own(self._row_of_value, low, rows):
            keys = low.astype(np.int64) << 32 | high
            distinct, first_rows, inverse = np.unique(keys, return_index=True, return_inverse=True)
            rows, parts = inverse.astype(np.int32), parts[first_rows]
            low = (distinct >> 32).astype(np.int32)
            high = (distinct & 0xFFFFFFFF).astype(np.int32)
        self._sums.append(_Sums(self.num_values, low, high, apart))
        self.chunk_of_value[self.num_values : self.num_values + len(low)] = parts
        rows += np.int32(self.num_values)
        self.num_values += len(low)
        return rows

    def count_contributions(self, values: Ints) -> Ints:
        """Return on how many ways sums lead from values to each input; 2 stands for more."""
        counts = np.zeros(self.num_values, dtype=np.int32)
        counts[values] = 1
        for first, low, high, apart in reversed(self._sums):
            here = counts[first : first + len(low)].copy()  # numpy copies all of it otherwise
            if not here.any():
                continue
            for side in (low.astype(np.intp), high.astype(np.intp)):
                if apart:
                    counts[side] = np.minimum(counts[side] + here, 2)
                else:
                    np.add.at(counts, side, here)
                    counts[side] = np.minimum(counts[side], 2)
        return counts[: self.num_inputs]

    def _mixed(self, step: int, cells: SlotAccess, cell: int) -> Problem:
        """Say which chunks are added to each other in a cell."""
        entries = np.flatnonzero(cells.writes == cell)
        held = self.chunk_of_value[self.slot_values[cell]]
        sent = self.chunk_of_value[self.slot_values[cells.reads[entries]]]
        entry = int(np.argmax(sent != held))
        row, _ = cells.get_origin(int(entries[entry]))
        source = self._name(cells.moves.src[row])
        what = f"adds chunk {sent[entry]} of {source} to chunk {held}"
        return Problem(self._at(step, cells.moves.dst[row]), what, "add chunks of the same number")

    def _at(self, step: int, place: int) -> str:
        return f"{self._name(place)}, step {step}"

    def _name(self, place: int) -> str:
        return self.collective.format_endpoint(int(place))


def _last_is_own(last: Ints, keys: Ints, rows: Ints) -> bool:
    """Return whether no key occurs twice; `last` is room for one entry per key."""
    last[keys] = rows
    return bool((last[keys] == rows).all())


def _waves(targets: Numbers) -> Iterator[Numbers]:
    """Go through entries so that each wave has every target at most once."""
    order = np.argsort(targets, kind="stable")
    ranked = targets[order]
    begins = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    lengths = np.diff(np.append(begins, len(ranked)))
    turn = np.arange(len(ranked)) - np.repeat(begins, lengths)
    by_turn = np.argsort(turn, kind="stable")
    ends = np.cumsum(np.bincount(turn))
    for first, end in zip([0, *ends], ends, strict=False):
        yield order[by_turn[first:end]]
