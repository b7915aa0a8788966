"""`SimulatedEngine`: one engine on a virtual clock. The batcher decides, a cost model prices it.

Steps in which nothing but decoding happens are taken many at a time, until somebody ends, blocks
run out, or contexts outgrow the line that prices them. Who comes meanwhile cuts them short: the
step that has begun is still done, and the others are decided anew. An engine that decides ahead
has decided the step after it, too.
"""

from array import array
from collections.abc import Collection
from math import ceil, inf, sqrt
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.policy.serving.graph_sizes import find_padded_size
from meshwright.policy.serving.scheduler import ScheduledChunk, Scheduler, SchedulerOutput, Sequence
from meshwright.predict.serving.cost.step_cost import count_steps_within
from meshwright.spec.scheduler_config import SchedulerConfig

_NEAR = 1e-9
"""Shares of a step that are rounding."""
Floats = npt.NDArray[np.float64]


class StepCostModel(Protocol):
    """What steps take."""

    def step_s(
        self,
        *,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
        decodes: int = 0,
        context_sum: float = 0.0,
        sampled: int | None = None,
        captured: int = 0,
    ) -> float:
        """Return the seconds of a step."""

    def fit_decode_cost(self, batch: int, mean_context: float) -> tuple[float, float, float]:
        """Return `fixed` and `slope`: steps that decode take `fixed + slope · contexts`.

        The third is the mean context up to which they do.
        """


class EngineSetup(NamedTuple):
    """One engine as a simulation sees it."""

    cost: StepCostModel
    scheduler_config: SchedulerConfig
    kv_blocks: int
    delay_s: float = 0.0
    """From a request at the server to its engine, and from a token to the client."""
    delay_steps: float = 0.0
    """The same in steps that decode, each as long as one of the batch that the request joins."""
    swap_s: float = 0.0
    """Seconds in which a block moves between the device and host memory."""
    async_scheduling: bool = False
    """A step is decided when the one before it begins: who comes meanwhile has to wait for both."""
    dp_groups: int = 1
    """Groups of GPUs with requests of their own, each of which sends and receives by itself."""


class StepRuns(NamedTuple):
    """Steps that were taken together, as columns."""

    start_s: Floats
    end_s: Floats
    steps: Floats
    decodes: Floats
    """Sequences that decoded in each of the steps."""
    prompt_tokens: Floats
    """Tokens of prompts that the step computed; 0 where there were several steps."""
    concurrent_sequences: Floats
    """Sequences that got a token beside these, and go on."""
    running: Floats
    """Sequences that have a place."""
    waiting: Floats
    """Sequences that wait for one, those aside that came during the steps."""
    used_blocks: Floats
    """Blocks in use."""


_ROW = Struct(f"{len(StepRuns._fields)}d")
"""One row of them, packed: three times as quick as letting an array take its numbers."""


class SimulatedEngine:
    """A batcher whose steps take as long as a cost model says."""

    __slots__ = (
        "_ahead",
        "_chunks",
        "_decodes",
        "_first_s",
        "_last_s",
        "_late",
        "_more_s",
        "_prompts",
        "_record",
        "_steps",
        "_swap_s",
        "_waiting",
        "began",
        "cost",
        "ends_s",
        "finished",
        "groups",
        "is_leaping",
        "is_waking",
        "number",
        "preempted",
        "scheduler",
        "start_s",
    )  # fmt: skip

    def __init__(self, station: EngineSetup, number: int = 0) -> None:
        self.number, self.groups = number, station.dp_groups
        self.scheduler, self.cost = (
            Scheduler(station.scheduler_config, station.kv_blocks),
            station.cost,
        )
        self._swap_s, self._ahead = station.swap_s, station.async_scheduling
        self.ends_s = inf
        """When what it does now is done; never, where it does nothing."""
        self.is_leaping = False
        """Whether it takes several steps, which can be cut short."""
        self.is_waking = False
        """Whether it looks what there is to do as soon as all who come now are there."""
        self.began: Collection[Sequence] = ()
        self.finished: Collection[Sequence] = ()
        self.preempted: Collection[Sequence] = ()
        """Who got a token beside those who decode, who got their last, and who made room."""
        self._chunks: Collection[ScheduledChunk] = ()
        self.start_s = self._first_s = self._more_s = 0.0
        self._last_s = 0.0
        """When the last of the steps that it takes now begins, and the next is decided ahead."""
        self._late: list[Sequence] = []
        """Who came after that."""
        self._steps = self._decodes = self._prompts = self._waiting = 0
        self._record = array("d")

    def wake_up(self, now_s: float) -> float:
        """Let one that does nothing look at what there is to do, in a moment."""
        self.is_waking, self.ends_s = True, now_s
        return now_s

    def add_sequence(self, sequence: Sequence, now_s: float) -> None:
        """Let a sequence wait until somebody decides about it."""
        if self._ahead and self.ends_s < inf and not self.is_waking and now_s > self._last_s:
            self._late.append(sequence)
        else:
            self.scheduler.add(sequence)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return self.scheduler.waiting_queue.count + len(self._late)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence leave that is not done."""
        if sequence in self._late:
            self._late.remove(sequence)
        else:
            self.scheduler.finish(sequence)

    def start_step(self, now_s: float) -> float:
        """Decide what is done next; return when it ends, infinity where there is nothing to do."""
        if self._late and self.is_waking:
            # Nothing was decided ahead.
            self._admit()
        self.start_s = self._last_s = now_s
        self.is_waking = False
        batcher = self.scheduler
        if steps := batcher.count_decode_only_steps():
            decoding = batcher.decode_set
            count, keys = decoding.num_sequences, decoding.attended_tokens
            mean = keys / count
            self._waiting = batcher.waiting_queue.count + len(self._late)
            fixed, slope, until = self.cost.fit_decode_cost(count, mean)
            if until - mean < steps - 1:
                steps = count_steps_within(steps, mean, until)
            self._steps, self._decodes, self._prompts = steps, count, 0
            self._first_s = first = fixed + slope * keys
            self._more_s = more = slope * count
            self.is_leaping = True
            self.ends_s = now_s + steps * (first + more * (steps - 1) / 2)
        elif batch := batcher.schedule():
            self._steps, self._decodes, self._chunks = 1, batch.num_decodes, batch.chunks
            self._waiting = batcher.waiting_queue.count + len(self._late)
            self.began, self.finished = batch.started_decoding, batch.finished
            self.preempted = batch.preempted
            self.ends_s = now_s + self._price(batch)
        else:
            self.ends_s = inf
        return self._caught_up(now_s) if self._late else self.ends_s

    def _caught_up(self, now_s: float) -> float:
        """Let in who came after the step now begun was decided; return when it ends."""
        if self.is_leaping:
            self._shorten(1)
        self._admit()
        return self.start_step(now_s) if self.ends_s == inf else self.ends_s

    def _admit(self) -> None:
        for sequence in self._late:
            self.scheduler.add(sequence)
        self._late.clear()

    def truncate_steps(self, now_s: float) -> float:
        """Take only the steps that are decided by now; return when the last of them ends."""
        left, first, more = now_s - self.start_s, self._first_s, self._more_s
        # The k-th step begins at k · first + more · k (k − 1) / 2.
        half = first - more / 2
        if more > 1e-9 * first:
            begun = (sqrt(half * half + 2 * more * left) - half) / more
        else:
            begun = left / first
        # Decided ahead is the step after one that has begun; right at a beginning it is not yet.
        decided = ceil(begun - _NEAR) + 1 if self._ahead else int(begun) + 1
        return self._shorten(min(self._steps, decided))

    def _shorten(self, steps: int) -> float:
        """Take so many steps of a leap, and no more; return when the last of them ends."""
        first, more = self._first_s, self._more_s
        self._steps, before = steps, steps - 1
        self._last_s = self.start_s + before * (first + more * (before - 1) / 2)
        self.ends_s = end = self.start_s + steps * (first + more * before / 2)
        self._leap()
        return end

    def finish_step(self) -> None:
        """Be done with it: see who `began`, who `finished` and who was `preempted`."""
        batcher, joined = self.scheduler, 0
        places, pool = batcher.running_set, batcher.block_pool
        if self.is_leaping:
            self._leap()
        else:
            for one in self.began:
                joined += one.decode_epoch > 0
        self._record.frombytes(
            _ROW.pack(
                self.start_s, self.ends_s, self._steps, self._decodes, self._prompts, joined,
                len(places), self._waiting, pool.size - pool.free_block_count,
            )
        )  # fmt: skip
        self.ends_s = inf

    def get_step_runs(self) -> StepRuns:
        """Return what it did."""
        rows = np.array(self._record, dtype=np.float64).reshape(-1, len(StepRuns._fields))
        return StepRuns(*(np.ascontiguousarray(column) for column in rows.T))

    def decode_s(self, prompt: int) -> float:
        """Return the seconds of a step that decodes for all who do, or for such a prompt alone."""
        decoding = self.scheduler.decode_set
        count, keys = decoding.num_sequences, decoding.attended_tokens
        if not count:
            count, keys = 1, prompt
        fixed, slope, _ = self.cost.fit_decode_cost(count, keys / count)
        return fixed + slope * keys

    def list_sampled(self) -> set[Sequence]:
        """Return whose token was computed in the last step, and not elsewhere before."""
        return {chunk.sequence for chunk in self._chunks if chunk.samples_token}

    def _leap(self) -> None:
        self.is_leaping = False
        self.began = self.preempted = self._chunks = ()
        self.finished = self.scheduler.schedule_decode_steps(self._steps)

    def _price(self, batch: SchedulerOutput) -> float:
        tokens = pairs = sampled = 0
        for _, start, stop, samples in batch.chunks:
            count = stop - start
            tokens += count
            # Each token sees those before it and itself.
            pairs += count * (start + stop + 1) // 2
            sampled += samples
        self._prompts = tokens
        most, size, draws = (
            self.scheduler.config.max_cudagraph_capture_size,
            0,
            batch.num_decodes + sampled,
        )
        if tokens and most:
            size = find_padded_size(tokens + batch.num_decodes, draws, most)
        moved_s = 0.0
        if batch.swap_in or batch.swap_out:
            moves = (*batch.swap_in, *batch.swap_out)
            moved_s = self._swap_s * sum(len(move.device_blocks) for move in moves)
        if not (tokens or batch.num_decodes):
            # Somebody comes with keys and values, and there is nothing else to do.
            return moved_s
        return moved_s + self.cost.step_s(
            prefill_tokens=tokens,
            prefill_pairs=pairs,
            decodes=batch.num_decodes,
            context_sum=batch.attended_tokens,
            sampled=draws,
            captured=size,
        )
