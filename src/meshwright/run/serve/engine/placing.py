"""`Placing`: which answer has which row of the device, and what a batch means in rows."""

from typing import NamedTuple

from meshwright.policy.batching import Batch, Batcher, Chunk, Sequence, State
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.orders import Entry, Going, Moved, Orders, Part, Written
from meshwright.run.serve.sampling.lines import is_penalised

Granted = list[tuple[Sequence, list[int]]]


class Drawing(NamedTuple):
    """An answer that draws in a step."""

    answer: Answer
    checks: bool
    """Whether it checks guesses, and gets a token for each that was right and one more."""


class Placing:
    """The rows of one engine."""

    def __init__(self, batcher: Batcher, rows: int) -> None:
        self._batcher = batcher
        self._free = list(range(rows - 1, -1, -1))
        self._decoding: dict[Answer, None] = {}
        self._joining: list[tuple[Answer, int, bool]] = []
        """Those that decode from the next step on: where their last token stands, and whether the
        device has drawn it."""
        self._shown: tuple[int, ...] = ()
        """Rows that the runner knows to decode."""

    def ordered(self, batch: Batch, granted: Granted) -> tuple[Orders, list[Drawing]]:
        """Put a batch into words that a runner understands; return who draws a token.

        `granted` are the blocks that its sequences were given.
        """
        for sequence in batch.preempted:
            self.leave(sequence.request)
        entries = tuple(
            self._enter(sequence.request)
            for sequence in (*batch.placed, *(child for _, child in batch.forked))
            if sequence.request.row < 0
        )
        written = tuple(
            Written(sequence.request.row, len(sequence.blocks) - len(blocks), tuple(blocks))
            for sequence, blocks in granted
        )
        going = self._going()
        # Steps of whole prompts alone let the others rest.
        decoding = list(self._decoding) if batch.decodes else []
        assert len(decoding) == batch.decodes, "batcher and engine count the same answers"
        rows = tuple(answer.row for answer in decoding)
        parts, more = _parts(batch)
        orders = Orders(
            moved_out=tuple(Moved(tuple(m.device), tuple(m.host)) for m in batch.moved_out),
            moved_in=tuple(Moved(tuple(m.device), tuple(m.host)) for m in batch.moved_in),
            copies=tuple(batch.copies),
            entries=entries,
            written=written,
            going=going,
            rows=None if rows == self._shown else rows,
            parts=parts,
        )
        self._shown = rows
        self._look_ahead(batch)
        return orders, [Drawing(answer, checks=False) for answer in decoding] + more

    def leave(self, answer: Answer) -> None:
        """Take an answer's row away."""
        self._decoding.pop(answer, None)
        if answer.row >= 0:
            self._free.append(answer.row)
            answer.row = -1

    def _enter(self, answer: Answer) -> Entry:
        answer.take_row(self._free.pop())
        sampling, written = answer.ask.sampling, answer.written
        return Entry(
            answer.row,
            sampling,
            answer.ask.prompt if is_penalised(sampling) else (),
            tuple(answer.ids[-written:]) if written else (),
            answer.choice,
            answer.adapter,
            answer.seeded,
        )

    def _going(self) -> tuple[Going, ...]:
        """Let those decode that joined with the last step."""
        going = []
        for answer, position, drawn in self._joining:
            if answer.row >= 0 and answer.finish is None:
                token = None if drawn else answer.ids[position]
                going.append(Going(answer.row, position, token))
                self._decoding[answer] = None
        self._joining = []
        return tuple(going)

    def _look_ahead(self, batch: Batch) -> None:
        """Write down who goes on and who does not."""
        computed = {chunk.sequence for chunk in batch.chunks}
        joined = [(sequence, sequence in computed) for sequence in batch.joined]
        joined += [(child, True) for _, child in batch.forked]
        for sequence, drawn in joined:
            if sequence.state is State.DECODING:
                position = self._batcher.tokens_of(sequence) - 1
                self._joining.append((sequence.request, position, drawn))
        for sequence in batch.finished:
            self.leave(sequence.request)


def checking(batch: Batch) -> list[Chunk]:
    """Return what a step computes of sequences that check guesses."""
    # Who joins with this step has computed the last of what is known, and guessed nothing yet.
    joined = set(batch.joined)
    return [
        chunk
        for chunk in batch.chunks
        if chunk.sequence.state is State.GUESSING and chunk.sequence not in joined
    ]


def _parts(batch: Batch) -> tuple[tuple[Part, ...], list[Drawing]]:
    """Return the tokens that a step computes beside decoding, and who draws behind them."""
    forks: dict[Sequence, list[Answer]] = {}
    for parent, child in batch.forked:
        forks.setdefault(parent, []).append(child.request)
    checked = {chunk.sequence for chunk in checking(batch)}
    parts: list[Part] = []
    drawing: list[Drawing] = []
    for sequence, start, stop, samples in batch.chunks:
        answer: Answer = sequence.request
        known = answer.ids[start:stop]
        checks = sequence in checked
        guessed = answer.guessed[: stop - start - len(known)]
        draws = [answer, *forks.get(sequence, ())] if samples else []
        rows = tuple(each.row for each in draws)
        told = answer.prompt_telling
        telling = None if told is None else told.order(start, stop)
        parts.append(Part(answer.row, start, (*known, *guessed), rows, checks, telling))
        drawing += [Drawing(each, checks) for each in draws]
    return tuple(parts), drawing
