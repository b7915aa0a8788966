"""When the value of every slot is there, and when nobody reads it any longer.

Sweeps carried out step by step write their times into plain arrays. Long regular sweeps leave a
`SweepSlotTimes` instead, which answers for the slots it touched: the slots of a ring over 4,096
ranks with 16 channels would not fit into memory one by one. A slot's times only ever grow, so what
holds is the largest that any of them says.
"""

import numpy as np

from meshwright.policy.collective.collective import Collective, Sweep
from meshwright.predict.collective.sim_network import Floats, Longs


class SlotTimes:
    """Times of all slots of all places."""

    def __init__(self, collective: Collective) -> None:
        self.endpoints, self.slots = collective.num_endpoints, collective.slots
        self._ready: Floats | None = None
        self._free: Floats | None = None
        self.records: list[SweepSlotTimes] = []

    def ready_s(self, place: Longs, slot: Longs) -> Floats:
        """Return since when values can be read."""
        found = np.zeros(len(place)) if self._ready is None else self._ready[self._at(place, slot)]
        for record in self.records:
            found = np.maximum(found, record.written_s(place, slot))
        return found

    def free_s(self, place: Longs, slot: Longs) -> Floats:
        """Return since when slots can be written: the value is there and has been read."""
        found = np.zeros(len(place)) if self._free is None else self._free[self._at(place, slot)]
        for record in self.records:
            found = np.maximum(found, record.written_s(place, slot))
            found = np.maximum(found, record.read_s(place, slot))
        return found

    def write(self, place: Longs, slot: Longs, end_s: Floats) -> None:
        """Note that values lie in slots from `end_s` on; of several writers the last one counts."""
        ready, free = self._arrays()
        cell = self._at(place, slot)
        np.maximum.at(ready, cell, end_s)
        np.maximum.at(free, cell, end_s)

    def read(self, place: Longs, slot: Longs, end_s: Floats) -> None:
        """Note that values are read until `end_s`."""
        np.maximum.at(self._arrays()[1], self._at(place, slot), end_s)

    def _at(self, place: Longs, slot: Longs) -> Longs:
        return place * self.slots + slot

    def _arrays(self) -> tuple[Floats, Floats]:
        if self._ready is None or self._free is None:
            self._ready = np.zeros(self.endpoints * self.slots)
            self._free = np.zeros(self.endpoints * self.slots)
        return self._ready, self._free


class SlotRows:
    """The rows of a sweep by the slot they touch first; from step to step it moves by one."""

    def __init__(self, sweep: Sweep, place: Longs, slot: Longs, slots: int) -> None:
        self.turn, self.wrap, self.span = sweep.shift.src_slot, sweep.shift.slot_wrap, sweep.span
        self.blocks = slots // self.wrap + 1
        self._along: Longs | None = None
        if sweep.shift.slot_order:
            order = np.array(sweep.shift.slot_order)
            self._along = np.arange(slots)
            self._along[order] = np.arange(len(order))
        self.key = place * self.blocks + slot // self.wrap
        self.start = slot % self.wrap
        self.order = np.argsort(self.key, kind="stable")
        self.sorted_key = self.key[self.order]

    def find_conflicts(self, key: Longs) -> tuple[Longs, Longs]:
        """Return pairs (index into `key`, row) of rows in the same place and block."""
        low = np.searchsorted(self.sorted_key, key, side="left")
        many = np.searchsorted(self.sorted_key, key, side="right") - low
        index = np.repeat(np.arange(len(key)), many)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(many) - many, many)
        return index, self.order[np.repeat(low, many) + offset]

    def find_accesses(self, place: Longs, slot: Longs) -> tuple[Longs, Longs, Longs]:
        """Return which rows touch which of the slots, and in which repetition."""
        along = slot if self._along is None else self._along[slot]
        index, row = self.find_conflicts(place * self.blocks + along // self.wrap)
        step = self.turn * (along[index] % self.wrap - self.start[row]) % self.wrap
        inside = step < self.span
        return index[inside], row[inside], step[inside]


class SweepSlotTimes:
    """The times of a regular sweep: those of some steps, then each a constant later.

    Where a sweep is too long to keep all of its steps, the oldest kept stands for those before it:
    never too early.
    """

    def __init__(
        self,
        readers: SlotRows,
        writers: SlotRows,
        *,
        latency_s: Floats,
        sent_s: Floats,
        delayed_s: dict[int, Floats],
        steps: range,
        pace_s: float,
    ) -> None:
        self._readers, self._writers = readers, writers
        self._latency_s, self._sent = latency_s, sent_s
        self._delayed = delayed_s
        self._steps, self._pace_s = steps, pace_s

    def written_s(self, place: Longs, slot: Longs) -> Floats:
        """Return when the sweep wrote slots; 0 where it did not."""
        index, row, step = self._writers.find_accesses(place, slot)
        times = self._sent_s(row, step) + self._latency_s[row]
        for one, delayed in self._delayed.items():
            times = np.where(step == one, np.maximum(times, delayed[row]), times)
        return _largest(len(place), index, times)

    def read_s(self, place: Longs, slot: Longs) -> Floats:
        """Return until when the sweep read slots; 0 where it did not."""
        index, row, step = self._readers.find_accesses(place, slot)
        return _largest(len(place), index, self._sent_s(row, step))

    def _sent_s(self, row: Longs, step: Longs) -> Floats:
        listed = np.clip(step, self._steps[0], self._steps[-1])
        times: Floats = self._sent[listed % len(self._sent), row]
        late: Floats = np.maximum(0, step - listed) * self._pace_s
        return times + late


def _largest(size: int, index: Longs, times: Floats) -> Floats:
    found = np.zeros(size)
    np.maximum.at(found, index, times)
    return found
