"""`Engine`: the batcher's decisions carried out by a runner, one step ahead of their results.

A turn decides a step and starts it, then reads the tokens of the step before. So the device has
its next step before the host has looked at the last one, and an answer's end is seen one step late:
what was computed for it meanwhile is thrown away. Where a grammar says which tokens may follow, the
step before is read between computing and drawing.

An engine is used by one thread; `loop` feeds it from others.
"""

import secrets
import time
from collections import abc
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.batching import Batch, Batcher, Sequence, State
from meshwright.run.serve.asked import Ask, Gauges, Piece, Sampling, TokenLogprob
from meshwright.run.serve.engine.answer import Answer, Silent, Sink, Text
from meshwright.run.serve.engine.orders import Entry, Going, Moved, Orders, Part, Written
from meshwright.run.serve.engine.runner import Landing, Runner
from meshwright.run.serve.sampling.lines import is_penalised, problems_of
from meshwright.run.serve.sampling.stops import Answer as Following
from meshwright.run.serve.sampling.telling import Told
from meshwright.spec.serving import Limits


class _Flying(NamedTuple):
    """A step whose tokens have not been read."""

    answers: list[Answer]
    landing: Landing


class Engine:
    """Answers many asks at a time."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        *,
        ends: frozenset[int] = frozenset(),
        decode: Callable[[abc.Sequence[int]], str] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Serve with a runner whose cache has its blocks.

        `ends` are tokens that end every answer, unless it asks to ignore them; `decode` makes text
        of tokens, where it is wanted; `shares` are weights of tenants.
        """
        if runner.forward.recurrent:
            # What lies in blocks is not all there is to know of a beginning, or of who made room.
            limits = msgspec.structs.replace(limits, prefix_cache=False, preemption="recompute")
        self.runner, self.limits, self.ends, self._decode = runner, limits, ends, decode
        self.batcher = Batcher(limits, runner.cache.blocks, shares=shares)
        self.max_length = min(
            runner.forward.max_length, runner.cache.blocks * limits.block_tokens + 1
        )
        self.vocab = runner.forward.decoder.model.vocab
        self._rows = list(range(limits.batch_requests - 1, -1, -1))
        """Rows that are free."""
        self._decoding: dict[Answer, None] = {}
        self._joining: list[tuple[Answer, int, bool]] = []
        """Those that decode from the next step on: where their last token stands, and whether the
        device has drawn it."""
        self._shown: tuple[int, ...] = ()
        """Rows that the runner knows to decode."""
        self._flying: _Flying | None = None
        self._outbox: list[tuple[Sink, Piece]] = []
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._progress_s = time.monotonic()

    # Asking.

    def add(self, ask: Ask, sink: Sink) -> list[Answer]:
        """Take an ask; its pieces go to the sink, in the thread that takes turns."""
        self.check(ask)
        sampling = ask.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
            ask = msgspec.structs.replace(ask, sampling=sampling)
        room = self.max_length - len(ask.prompt)
        most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        answers = [
            Answer(ask, choice, most, sink, self._text(sampling, most))
            for choice in range(sampling.n)
        ]
        answers[0].name_blocks(self.limits.block_tokens)
        for answer in answers[1:]:
            answer.keys = list(answers[0].keys)
        others = tuple(self._sequence(answer) for answer in answers[1:])
        if self.runner.forward.recurrent:
            # States are no blocks: each choice computes its own.
            for sequence in (self._sequence(answers[0]), *others):
                self.batcher.add(sequence)
        else:
            self.batcher.add(self._sequence(answers[0], others))
        return answers

    def _text(self, sampling: Sampling, most: int) -> Text:
        if self._decode is not None:
            return Following(self._decode, sampling, tuple(self.ends), most)
        ends = frozenset[int]() if sampling.ignore_eos else self.ends
        return Silent(ends, frozenset(sampling.stop_tokens), sampling.min_tokens, most)

    def _sequence(self, answer: Answer, forks: tuple[Sequence, ...] = ()) -> Sequence:
        ask = answer.ask
        answer.sequence = Sequence(
            len(ask.prompt),
            answer.most,
            request=answer,
            keys=answer.keys if self.limits.prefix_cache else None,
            priority=ask.priority,
            tenant=ask.tenant,
            forks=forks,
        )
        return answer.sequence

    def check(self, ask: Ask) -> None:
        """Raise `InputError` where an ask cannot be answered at all; any thread may call it."""
        sampling, problems = ask.sampling, problems_of(ask.sampling, self.vocab)
        if not ask.prompt:
            problems.append(Problem("prompt", "holds no token", "give one at least"))
        elif not 0 <= min(ask.prompt) <= max(ask.prompt) < self.vocab:
            wrong = next(token for token in ask.prompt if not 0 <= token < self.vocab)
            fix = f"use ids from 0 to {self.vocab - 1}"
            problems.append(Problem("prompt", f"{wrong} is no token of this model", fix))
        if len(ask.prompt) >= self.max_length:
            what = f"{len(ask.prompt):,} tokens leave no room for an answer in {self.max_length:,}"
            problems.append(Problem("prompt", what, "shorten it"))
        if sampling.n > self.limits.batch_requests:
            what = f"{sampling.n} answers at a time, the engine has {self.limits.batch_requests}"
            problems.append(Problem("n", what, f"use at most {self.limits.batch_requests}"))
        if sampling.stop and self._decode is None:
            what = "stop texts, but this engine has no words"
            problems.append(Problem("stop", what, "give stop_tokens"))
        if problems:
            raise InputError(problems)

    def cancel(self, answers: list[Answer]) -> None:
        """End answers that nobody waits for any more."""
        for answer in answers:
            if answer.finish is None:
                self._send(answer, answer.cancel())
                self._drop(answer)

    # Turns.

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.batcher.running or self.batcher.waiting or self._flying)

    def turn(self) -> bool:
        """Start a step and read the one before; return whether there was anything to do."""
        batch = self.batcher.next()
        flying, self._flying = self._flying, None
        if batch is None:
            if flying is not None:
                self._land(flying)
            return flying is not None
        orders, answers = self._ordered(batch)
        computed = self.runner.compute(orders)
        landing = self.runner.draw(computed)
        if landing is not None:
            self._flying = _Flying(answers, landing)
        self._steps += 1
        if flying is not None:
            self._land(flying)
        self._progress_s = time.monotonic()
        return True

    def outbox(self) -> list[tuple[Sink, Piece]]:
        """Take the pieces that are ready, with where they go."""
        ready, self._outbox = self._outbox, []
        return ready

    def gauges(self) -> Gauges:
        """Return what the engine does at this moment."""
        pool, batcher = self.batcher.pool, self.batcher
        return Gauges(
            running=batcher.running,
            waiting=len(batcher.waiting),
            kv_usage=pool.held / pool.size,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            prefix_queries=batcher.queried,
            prefix_hits=batcher.hits,
            preemptions=batcher.preemptions,
            steps=self._steps,
            idle_s=None if self.is_idle else time.monotonic() - self._progress_s,
        )

    def _ordered(self, batch: Batch) -> tuple[Orders, list[Answer]]:
        """Put a batch into words that a runner understands; return who draws a token."""
        for sequence in batch.preempted:
            self._leave_row(sequence.request)
        entries = [
            self._enter(sequence.request)
            for sequence in (*batch.placed, *(child for _, child in batch.forked))
            if sequence.request.row < 0
        ]
        written = tuple(
            Written(sequence.request.row, len(sequence.blocks) - len(blocks), tuple(blocks))
            for sequence, blocks in self.batcher.grants(batch)
        )
        going = self._going()
        # Steps of whole prompts alone let the others rest.
        drawing = list(self._decoding) if batch.decodes else []
        assert len(drawing) == batch.decodes, "batcher and engine count the same answers"
        rows = tuple(answer.row for answer in drawing)
        parts, more = self._parts(batch)
        orders = Orders(
            moved_out=tuple(Moved(tuple(m.device), tuple(m.host)) for m in batch.moved_out),
            moved_in=tuple(Moved(tuple(m.device), tuple(m.host)) for m in batch.moved_in),
            copies=tuple(batch.copies),
            entries=tuple(entries),
            written=written,
            going=tuple(going),
            rows=None if rows == self._shown else rows,
            parts=tuple(parts),
        )
        self._shown = rows
        self._look_ahead(batch)
        return orders, drawing + more

    def _parts(self, batch: Batch) -> tuple[list[Part], list[Answer]]:
        """Return the parts of prompts that a step computes, and who draws behind them."""
        forks: dict[Sequence, list[Answer]] = {}
        for parent, child in batch.forked:
            forks.setdefault(parent, []).append(child.request)
        parts, drawing = [], []
        for sequence, start, stop, samples in batch.chunks:
            answer: Answer = sequence.request
            draws = [answer, *forks.get(sequence, ())] if samples else []
            rows = tuple(each.row for each in draws)
            parts.append(Part(answer.row, start, tuple(answer.ids[start:stop]), rows))
            drawing += draws
            self._prompt_tokens += stop - start
        return parts, drawing

    def _going(self) -> list[Going]:
        """Let those decode that joined with the last step."""
        going = []
        for answer, position, drawn in self._joining:
            if answer.row >= 0 and answer.finish is None:
                token = None if drawn else answer.ids[position]
                going.append(Going(answer.row, position, token))
                self._decoding[answer] = None
        self._joining = []
        return going

    def _look_ahead(self, batch: Batch) -> None:
        """Write down who goes on and who does not."""
        computed = {chunk.sequence for chunk in batch.chunks}
        for sequence in batch.joined:
            if sequence.state is State.DECODING:
                position = self.batcher.tokens_of(sequence) - 1
                self._joining.append((sequence.request, position, sequence in computed))
        for _, child in batch.forked:
            if child.state is State.DECODING:
                position = self.batcher.tokens_of(child) - 1
                self._joining.append((child.request, position, True))
        for sequence in batch.finished:
            self._leave_row(sequence.request)

    # Rows.

    def _enter(self, answer: Answer) -> Entry:
        answer.row = self._rows.pop()
        sampling, written = answer.ask.sampling, answer.written
        counts = is_penalised(sampling)
        return Entry(
            answer.row,
            sampling,
            answer.ask.prompt if counts else (),
            tuple(answer.ids[-written:]) if written else (),
            answer.choice,
            answer.adapter,
        )

    def _leave_row(self, answer: Answer) -> None:
        self._decoding.pop(answer, None)
        if answer.row >= 0:
            self._rows.append(answer.row)
            answer.row = -1

    def _drop(self, answer: Answer) -> None:
        """Take an answer out that goes on no further."""
        self._leave_row(answer)
        self.batcher.end(answer.sequence)

    # Results.

    def _land(self, flying: _Flying) -> None:
        """Read the tokens of a step."""
        tokens, told = flying.landing.wait()
        likely = _likelihoods(flying, tokens, told) if told is not None else {}
        block = self.limits.block_tokens
        for place, answer in enumerate(flying.answers):
            if answer.finish is not None:
                continue
            piece = answer.take((tokens[place],), likely.get(place, ()))
            self._output_tokens += len(piece.tokens)
            self._send(answer, piece)
            if piece.finish is not None:
                self._drop(answer)
            elif self.limits.prefix_cache:
                answer.name_blocks(block)

    def _send(self, answer: Answer, piece: Piece) -> None:
        self._outbox.append((answer.sink, piece))


def _likelihoods(
    flying: _Flying, tokens: list[int], told: Told
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return how likely the tokens were, of those who asked."""
    own, top, top_tokens = (part.tolist() for part in told)
    asking = [
        (place, answer.ask.sampling.logprobs)
        for place, answer in enumerate(flying.answers)
        if answer.ask.sampling.logprobs is not None
    ]
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    for line, (place, count) in enumerate(asking):
        others = tuple(zip(top_tokens[line][:count], top[line][:count], strict=True))
        found[place] = (TokenLogprob(tokens[place], own[line], others),)
    return found
