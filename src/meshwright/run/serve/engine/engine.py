"""`Engine`: the batcher's decisions carried out by a runner, one step ahead of their results.

A turn decides a step and starts it, then reads the tokens of the step before. So the device has
its next step before the host has looked at the last one, and an answer's end is seen one step late:
what was computed for it meanwhile is thrown away. A step with parts of prompts takes the host long
to start: tokens that are there by then are read first. Where a grammar says which tokens may
follow, the step before is read between computing and drawing. Where tokens are guessed ahead, or a
processor computes, it is read before the next is decided.

An engine is used by one thread; `loop` feeds it from others.
"""

import secrets
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.batching import Batcher, Sequence
from meshwright.run.serve.asked import Ask, Gauges, Piece, Sink, TokenLogprob
from meshwright.run.serve.engine.adapting import Adapting
from meshwright.run.serve.engine.answer import Answer, Silent, Text
from meshwright.run.serve.engine.checks import Offer, check_ask
from meshwright.run.serve.engine.counting import Counts
from meshwright.run.serve.engine.guessing import Guesses, Guessing
from meshwright.run.serve.engine.handing import Handing
from meshwright.run.serve.engine.likelihoods import likelihoods
from meshwright.run.serve.engine.placing import Drawing, Placing
from meshwright.run.serve.engine.prompt_telling import PromptTelling, hand_out
from meshwright.run.serve.engine.runner import Landing
from meshwright.run.serve.engine.runs import Runs
from meshwright.run.serve.parcels import Parcel, ParcelLost, Post
from meshwright.run.serve.sampling.grammar import Grammars
from meshwright.run.serve.sampling.masks import Masks
from meshwright.run.serve.sampling.stops import Answer as Following
from meshwright.spec.serving import Limits

Reader = Callable[[tuple[str, ...]], Callable[[abc.Sequence[int]], str]]
"""Returns what makes text of tokens, with the special ones that are to be shown."""


class _Flying(NamedTuple):
    """A step whose tokens have not been read."""

    drawing: list[Drawing]
    landing: Landing


class Engine:
    """Answers many asks at a time."""

    def __init__(
        self,
        runner: Runs,
        limits: Limits,
        *,
        ends: frozenset[int] = frozenset(),
        reader: Reader | None = None,
        grammars: Grammars | None = None,
        guesses: Guesses | None = None,
        shares: Mapping[str, float] | None = None,
        post: Post | None = None,
    ) -> None:
        """Serve with a runner whose cache has its blocks.

        `ends` are tokens that end every answer, unless it asks to ignore them; `reader` returns
        what makes text of tokens; `grammars` bind answers; `guesses` let a step check several
        tokens of an answer; `shares` are weights of tenants; `post` sends keys and values to other
        engines, through shared memory where nothing else is said.
        """
        if runner.forward.recurrent:
            # What lies in blocks is not all there is to know of a beginning.
            limits = msgspec.structs.replace(limits, prefix_cache=False)
            if limits.preemption == "swap":
                what = "states of recurrent layers are not moved to host memory"
                raise InputError([Problem("preemption", what, "use recompute, the default")])
            if guesses is not None:
                what = "states of recurrent layers cannot be taken back when a guess was wrong"
                raise InputError([Problem("guesses", what, "serve this model without")])
        self.runner, self.limits, self.ends, self._reader = runner, limits, ends, reader
        self.batcher = Batcher(
            limits, runner.cache.blocks, shares=shares, guesses=guesses is not None
        )
        room = runner.cache.blocks * limits.block_tokens
        # The last token of an answer is kept nowhere; those of an embedded prompt all are.
        self.max_length = min(runner.forward.max_length, room + 1)
        self.embed_length = min(runner.forward.max_length, room)
        self.vocab = runner.forward.decoder.model.vocab
        self.version = 0
        """Of the weights: 0 are those it began with. Prefixes are found under their own alone."""
        self.weights = ""
        """What these weights are called by whoever has the same, however often they changed."""
        self.expected = 0
        """Things under way outside the batcher, for which weights and cache have to stay."""
        self.unfit = ""
        """Why nothing may be asked, where its weights are parts of two versions."""
        self._placing = Placing(self.batcher, limits.batch_requests)
        self._grammars = grammars
        self._guessing = None if guesses is None else Guessing(guesses, self.batcher)
        self._handing = Handing(runner.cache, post)
        self._masks: Masks | None = None
        self._flying: _Flying | None = None
        self._outbox: list[tuple[Sink, Piece]] = []
        self._counts, self._adapting = Counts(), Adapting()
        self._progress_s = time.monotonic()

    # Asking.

    def add(self, ask: Ask, sink: Sink, brought: bytes | bytearray | None = None) -> list[Answer]:
        """Take an ask; its pieces go to the sink, in the thread that takes turns.

        `brought` are the keys and values of an ask that comes with them.

        Raises:
            InputError: where it cannot be answered at all.
            ParcelLost: where other weights made what it comes with.
        """
        self.check(ask)
        sampling, seeded = ask.sampling, ask.sampling.seed is not None
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
            ask = msgspec.structs.replace(ask, sampling=sampling)
        most = 1 if ask.hands_over else self.room_of(ask)
        answers = [self._answer(ask, choice, most, sink, seeded) for choice in range(sampling.n)]
        answers[0].name_blocks(self.limits.block_tokens)
        for answer in answers[1:]:
            answer.keys = list(answers[0].keys)
        if ask.brought is not None:
            self._go_on_with(answers[0], ask.brought, brought)
            self._adapting.add(answers)
            return answers
        if ask.prompt_logprobs is not None:
            apart = self.runner.forward.recurrent
            telling = [PromptTelling(ask.prompt, ask.prompt_logprobs) for _ in answers]
            for answer, own in zip(answers, telling, strict=True):
                # Who computes a prompt by itself tells by itself.
                answer.prompt_telling = own if apart else telling[0]
        others = tuple(self._sequence(answer) for answer in answers[1:])
        if self.runner.forward.recurrent:
            # States are no blocks: each choice computes its own.
            for sequence in (self._sequence(answers[0]), *others):
                self.batcher.add(sequence)
        else:
            self.batcher.add(self._sequence(answers[0], others))
        self._adapting.add(answers)
        return answers

    def room_of(self, ask: Ask) -> int:
        """Return how many tokens an answer may have at most."""
        room, most = self.max_length - len(ask.prompt), ask.sampling.max_tokens
        return room if most is None else min(most, room)

    def _go_on_with(
        self, answer: Answer, parcel: Parcel, brought: bytes | bytearray | None
    ) -> None:
        """Go on where another engine has computed the prompt and drawn a token."""
        if parcel.weights != self.weights:
            raise ParcelLost("keys and values came that other weights made")
        sequence = self._sequence(answer)
        sequence.done, sequence.cached = len(answer.ask.prompt), parcel.cached_tokens
        answer.brought, answer.queued_s = brought, parcel.queued_s
        told = () if parcel.likely is None else (TokenLogprob(parcel.first, *parcel.likely),)
        piece = answer.take((parcel.first,), told)
        self._counts.output_tokens += 1
        self._outbox.append((answer.sink, piece))
        if piece.finish is None:
            self.batcher.add(sequence)

    def check(self, ask: Ask) -> None:
        """Raise `InputError` where an ask cannot be answered at all; any thread may call it."""
        if self.unfit:
            raise InputError([Problem("engine", self.unfit, "give it whole weights")])
        check_ask(ask, self.offer)
        if ask.sampling.grammar is not None and self._grammars is not None:
            self._grammars.guide(ask.sampling.grammar)

    @property
    def offer(self) -> Offer:
        """What can be asked of this engine."""
        return Offer(
            vocab=self.vocab,
            max_length=self.max_length,
            choices=self.limits.batch_requests,
            adapters=tuple(self.adapters),
            words=self._reader is not None,
            asleep=self.asleep,
            hands_over=self.hands_over,
            block_tokens=self.limits.block_tokens,
            block_bytes=self.runner.cache.block_bytes,
        )

    @property
    def asleep(self) -> bool:
        """Whether it has given back memory that answers need."""
        return self.runner.cache.asleep or not self.runner.forward.has_weights

    @property
    def hands_over(self) -> bool:
        """Whether keys and values can go to another engine, or come from one."""
        alone = self.runner.ranks == 1
        return alone and not self.runner.forward.recurrent and self._guessing is None

    def cancel(self, answers: list[Answer]) -> None:
        """End answers that nobody waits for any more."""
        for answer in answers:
            if answer.finish is None:
                self._outbox.append((answer.sink, answer.cancel()))
                self._drop(answer)

    def _answer(self, ask: Ask, choice: int, most: int, sink: Sink, seeded: bool) -> Answer:
        sampling, guide = ask.sampling, None
        if sampling.grammar is not None and self._grammars is not None:
            guide = self._grammars.guide(sampling.grammar)
        adapter = self.slot_of(ask.adapter)
        text = self._text(ask, most)
        # Guesses that a grammar forbids are left out, by which the rest is not left to chance.
        seeded = seeded or guide is not None
        return Answer(
            ask, choice, most, sink, text, guide=guide, adapter=adapter, seeded=seeded,
            version=self.version,
        )  # fmt: skip

    @property
    def adapters(self) -> Mapping[str, int]:
        """The slot of each adapter that can be asked for."""
        return {} if self.runner.adapters is None else self.runner.adapters.names

    def slot_of(self, adapter: str | None) -> int:
        """Return the slot of an adapter, or of what is usual; -1 is the model by itself."""
        if adapter is not None:
            return self.adapters[adapter]
        return -1 if self.runner.adapters is None else self.runner.adapters.usual

    def _text(self, ask: Ask, most: int) -> Text:
        sampling = ask.sampling
        if self._reader is not None:
            return Following(self._reader(ask.shown), sampling, tuple(self.ends), most)
        ends = frozenset[int]() if sampling.ignore_eos else self.ends
        return Silent(ends, frozenset(sampling.stop_tokens), sampling.min_tokens, most)

    def _sequence(self, answer: Answer, forks: tuple[Sequence, ...] = ()) -> Sequence:
        ask = answer.ask
        answer.sequence = Sequence(
            len(ask.prompt),
            answer.most,
            request=answer,
            # Of what is found in the cache nobody could say how likely it was.
            keys=answer.keys
            if self.limits.prefix_cache and answer.prompt_telling is None
            else None,
            priority=ask.priority,
            tenant=ask.tenant,
            forks=forks,
        )
        return answer.sequence

    def close(self) -> None:
        """Let go of what others might have collected, and of threads."""
        if self._masks is not None:
            self._masks.close()
        self._handing.close()

    # Turns.

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.batcher.running or self.batcher.waiting or self._flying)

    def turn(self) -> bool:
        """Start a step and read the one before; return whether there was anything to do."""
        flying, self._flying = self._flying, None
        if flying is not None and (self._guessing is not None or flying.landing.by_host):
            self._land(flying)
            flying = None
        if self._guessing is not None:
            self._guessing.plan()
        batch = self.batcher.next()
        if batch is None:
            if flying is not None:
                self._land(flying)
            return flying is not None
        granted = self.batcher.grants(batch)
        if self._guessing is not None:
            self._guessing.fill(batch)
        orders, drawing = self._placing.ordered(batch, granted)
        if arrived := self._handing.arrived(batch):
            orders = msgspec.structs.replace(orders, arrived=arrived)
        if flying is not None and orders.parts and flying.landing.is_there:
            self._land(flying)
            flying = None
        computed = self.runner.compute(orders)
        tellers = (each.sequence.request.prompt_telling for each in batch.chunks)
        hand_out(tellers, orders.parts, self.runner.told)
        if flying is not None and any(each.answer.guide is not None for each in drawing):
            self._land(flying)
            flying = None
        if computed is not None:
            self._handing.pack(each.answer for each in drawing)
            mask = self._mask(drawing, computed.lines.ends)
            if self._guessing is not None:
                chances = self._guessing.guesses.chances(drawing, computed.lines.ends)
                computed = replace(computed, chances=chances)
            self._flying = _Flying(drawing, self.runner.draw(computed, mask))
        self._counts.step(batch)
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
            prefix_queries=batcher.cache.queried,
            prefix_hits=batcher.cache.hits,
            preemptions=batcher.preemptions,
            idle_s=None if self.is_idle else time.monotonic() - self._progress_s,
            blocks=pool.size,
            block_tokens=self.limits.block_tokens,
            prefix_cache=self.limits.prefix_cache,
            **self._adapting.told(),
            **self._counts.told(),
        )

    def _mask(self, drawing: list[Drawing], ends: tuple[int, ...]) -> Tensor | None:
        """Return which tokens grammars allow at each line; None where there are none."""
        guides = [
            (ends[place - 1] if place else 0, answer.guide, answer.guessed if checks else ())
            for place, (answer, checks) in enumerate(drawing)
            if answer.guide is not None and answer.finish is None
        ]
        if not guides:
            return None
        if self._masks is None:
            self._masks = Masks(self.vocab, self.runner.cache.device)
        self._masks.begin(guides, ends[-1])
        return self._masks.ready()

    # Results.

    def _land(self, flying: _Flying) -> None:
        """Read the tokens of a step."""
        tokens, told = flying.landing.wait()
        likely = {}
        if told is not None:
            asked = [answer.ask.sampling.logprobs for answer, _ in flying.drawing]
            likely = likelihoods(asked, flying.landing.lines, tokens, told)
        for place, drawing in enumerate(flying.drawing):
            answer = drawing.answer
            if answer.finish is not None:
                continue
            if not answer.begun and answer.choice == 0:
                # Once for each ask, as it begins: not what is computed anew, nor guesses.
                self._counts.prompt_tokens += len(answer.ask.prompt)
            if answer.taken is not None:
                told_here = likely.get(place, ())
                sent = self._handing.send(answer, tokens[place][0], self.weights, told_here)
                self._outbox.append((answer.sink, sent))
                self._drop(answer)
                continue
            if drawing.checks and answer.guessed:
                self._counts.draft(len(answer.guessed), len(tokens[place]) - 1)
            piece = answer.take(tokens[place], likely.get(place, ()))
            self._counts.output_tokens += len(piece.tokens)
            self._outbox.append((answer.sink, piece))
            if piece.finish is not None:
                self._drop(answer)
                continue
            if self.limits.prefix_cache:
                answer.name_blocks(self.limits.block_tokens)
            if self._guessing is not None:
                self._guessing.land(drawing, len(tokens[place]))

    def _drop(self, answer: Answer) -> None:
        """Take an answer out that goes on no further."""
        self._adapting.drop(answer)
        self._placing.leave(answer)
        self.batcher.end(answer.sequence)
        if self._guessing is not None:
            self._guessing.drop(answer)

    def forget(self) -> None:
        """Find nothing of what lies in the blocks any more: the weights or the cache change."""
        self.batcher.pool.forget()
        if self._guessing is not None:
            self._guessing.guesses.forget()
