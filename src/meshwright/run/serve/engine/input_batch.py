"""`InputBatch`: which answer has which row of the device, and what a batch means in rows."""

from typing import NamedTuple

from meshwright.policy.serving.scheduler import (
    ScheduledChunk,
    Scheduler,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)
from meshwright.run.serve.engine.model_input import (
    BlockSwapIds,
    BlockTableUpdate,
    DecodeStart,
    ModelInput,
    NewRow,
    RowChunk,
)
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.sampling.sampling_metadata import uses_penalties

NewBlocks = list[tuple[Sequence, list[int]]]


class SampledRow(NamedTuple):
    """An answer that draws in a step."""

    state: SequenceState
    verifies_drafts: bool
    """Whether it checks guesses, and gets a token for each that was right and one more."""


class InputBatch:
    """The rows of one engine."""

    def __init__(self, scheduler: Scheduler, rows: int) -> None:
        self._batcher = scheduler
        self._free = list(range(rows - 1, -1, -1))
        self._decoding: dict[SequenceState, None] = {}
        self._joining: list[tuple[SequenceState, int, bool]] = []
        """Those that decode from the next step on: where their last token stands, and whether the
        device has drawn it."""
        self._shown: tuple[int, ...] = ()
        """Rows that the runner knows to decode."""

    def build_model_input(
        self, batch: SchedulerOutput, granted: NewBlocks
    ) -> tuple[ModelInput, list[SampledRow]]:
        """Put a batch into words that a runner understands; return who draws a token.

        `granted` are the blocks that its sequences were given.
        """
        for sequence in batch.preempted:
            self.remove(sequence.state)
        entries = tuple(
            self._enter(sequence.state)
            for sequence in (*batch.admitted, *(child for _, child in batch.forked))
            if sequence.state.row < 0
        )
        written = tuple(
            BlockTableUpdate(sequence.state.row, len(sequence.blocks) - len(blocks), tuple(blocks))
            for sequence, blocks in granted
        )
        going = self._going()
        # Steps of whole prompts alone let the others rest.
        decoding = list(self._decoding) if batch.num_decodes else []
        assert len(decoding) == batch.num_decodes, "batcher and engine count the same answers"
        rows = tuple(answer.row for answer in decoding)
        parts, more = _parts(batch)
        orders = ModelInput(
            swap_out=tuple(
                BlockSwapIds(tuple(m.device_blocks), tuple(m.host_blocks)) for m in batch.swap_out
            ),
            swap_in=tuple(
                BlockSwapIds(tuple(m.device_blocks), tuple(m.host_blocks)) for m in batch.swap_in
            ),
            block_copies=tuple(batch.block_copies),
            new_rows=entries,
            block_table_updates=written,
            decode_starts=going,
            decode_rows=None if rows == self._shown else rows,
            chunks=parts,
        )
        self._shown = rows
        self._look_ahead(batch)
        return orders, [SampledRow(answer, verifies_drafts=False) for answer in decoding] + more

    def remove(self, state: SequenceState) -> None:
        """Take an answer's row away."""
        self._decoding.pop(state, None)
        if state.row >= 0:
            self._free.append(state.row)
            state.row = -1

    def _enter(self, state: SequenceState) -> NewRow:
        state.assign_row(self._free.pop())
        sampling, written = state.request.sampling_params, state.output_token_count
        return NewRow(
            state.row,
            sampling,
            state.request.prompt_token_ids if uses_penalties(sampling) else (),
            tuple(state.token_ids[-written:]) if written else (),
            state.index,
            state.lora_slot,
            state.has_seed,
        )

    def _going(self) -> tuple[DecodeStart, ...]:
        """Let those decode that joined with the last step."""
        going = []
        for answer, position, drawn in self._joining:
            if answer.row >= 0 and answer.finish_reason is None:
                token = None if drawn else answer.token_ids[position]
                going.append(DecodeStart(answer.row, position, token))
                self._decoding[answer] = None
        self._joining = []
        return tuple(going)

    def _look_ahead(self, batch: SchedulerOutput) -> None:
        """Write down who goes on and who does not."""
        computed = {chunk.sequence for chunk in batch.chunks}
        joined = [(sequence, sequence in computed) for sequence in batch.started_decoding]
        joined += [(child, True) for _, child in batch.forked]
        for sequence, drawn in joined:
            if sequence.status is SequenceStatus.DECODING:
                position = self._batcher.count_tokens(sequence) - 1
                self._joining.append((sequence.state, position, drawn))
        for sequence in batch.finished:
            self.remove(sequence.state)


def find_verification_chunks(batch: SchedulerOutput) -> list[ScheduledChunk]:
    """Return what a step computes of sequences that check guesses."""
    # Who joins with this step has computed the last of what is known, and guessed nothing yet.
    joined = set(batch.started_decoding)
    return [
        chunk
        for chunk in batch.chunks
        if chunk.sequence.status is SequenceStatus.SPECULATING and chunk.sequence not in joined
    ]


def _parts(batch: SchedulerOutput) -> tuple[tuple[RowChunk, ...], list[SampledRow]]:
    """Return the tokens that a step computes beside decoding, and who draws behind them."""
    forks: dict[Sequence, list[SequenceState]] = {}
    for parent, child in batch.forked:
        forks.setdefault(parent, []).append(child.state)
    checked = {chunk.sequence for chunk in find_verification_chunks(batch)}
    parts: list[RowChunk] = []
    drawing: list[SampledRow] = []
    for sequence, start, stop, samples in batch.chunks:
        answer: SequenceState = sequence.state
        known = answer.token_ids[start:stop]
        checks = sequence in checked
        guessed = answer.draft_token_ids[: stop - start - len(known)]
        draws = [answer, *forks.get(sequence, ())] if samples else []
        rows = tuple(each.row for each in draws)
        told = answer.prompt_logprobs_collector
        telling = None if told is None else told.request_range(start, stop)
        parts.append(RowChunk(answer.row, start, (*known, *guessed), rows, checks, telling))
        drawing += [SampledRow(each, checks) for each in draws]
    return tuple(parts), drawing
