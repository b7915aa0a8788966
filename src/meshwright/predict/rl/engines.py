"""`Engines`: engines on a virtual clock whose requests are the samples of groups."""

from collections.abc import Callable
from math import ceil, inf

from meshwright.errors import InputError, Problem
from meshwright.policy.batching import Sequence, State
from meshwright.policy.captured import captured_size
from meshwright.policy.rollout import Dealer, Dealing, Drop, Generate
from meshwright.predict.rl.setup import Drawn, Rounds
from meshwright.predict.serving.clocked import Clocked, Station
from meshwright.predict.serving.fleet import Copies, blocks_of

Expect = Callable[[float, Clocked], None]
"""Called with when an engine wants to be looked at."""


def require_room(engines: Copies, rounds: Rounds) -> float:
    """Return how long the mean sample of a step is, where engines have room for any.

    Raises:
        InputError: where an engine's weights leave none.
    """
    drawn = [rounds.drawn(group) for group in range(rounds.prompts)]
    mean = sum(one.tokens for one in drawn) / (rounds.samples * len(drawn))
    try:
        blocks_of(engines.replica, engines.limits, mean)
    except InputError as error:
        fix = "use engines of more GPUs with --tp"
        if engines.replica.formats.weights in ("fp32", "bf16", "fp16"):
            fix += ", or --precision fp8"
        if engines.replica.taken_bytes:
            fix += ", or let the trainer keep less there: more GPUs, or turns (colocated)"
        what = f"an engine's {error.problems[0].what}"
        raise InputError([Problem("engines", what, fix)]) from None
    return mean


class _Sample:
    """Whose answer a sequence is."""

    __slots__ = ("asked", "engine")

    def __init__(self, asked: Generate, engine: int) -> None:
        self.asked, self.engine = asked, engine


class Engines:
    """All of them, with the groups they have."""

    def __init__(self, stations: list[Station], expect: Expect, deals: Dealing) -> None:
        self.engines = [Clocked(one, number) for number, one in enumerate(stations)]
        self.block = stations[0].limits.block_tokens
        self._expect = expect
        self._dealer = Dealer(len(stations), deals)
        self._left: dict[Generate, dict[Sequence, None]] = {}
        """Groups with their sequences that are not done."""
        self._held: set[int] = set()
        """Engines that stand still while weights come in."""

    def submit(self, asked: Generate, drawn: Drawn, now_s: float) -> None:
        """Let the samples of a group wait at engines, each where it is dealt to."""
        keys = [(asked.group, asked.version, at) for at in range(drawn.prompt // self.block)]
        left: dict[Sequence, None] = {}
        for answer in drawn.answers:
            place = self._dealer.send(asked.group, drawn.prompt)
            sequence = Sequence(
                drawn.prompt, answer, request=_Sample(asked, place), keys=list(keys)
            )
            left[sequence] = None
            engine = self.engines[place]
            if engine.is_leaping:
                self._expect(engine.cut(now_s), engine)
            engine.take(sequence, now_s)
            if engine.ends_s == inf and place not in self._held:
                self._expect(engine.wake(now_s), engine)
        self._left[asked] = left

    def stepped(self, engine: Clocked, now_s: float) -> list[Generate]:
        """Go on after a step; return the groups that it completed."""
        done = []
        if not engine.is_waking:
            engine.finish()
            for sequence in engine.finished:
                asked = self._out(sequence)
                if asked is not None:
                    done.append(asked)
        if engine.number in self._held:
            engine.ends_s, engine.is_waking = inf, False
        else:
            self._expect(engine.begin(now_s), engine)
        return done

    def drop(self, dropped: Drop, now_s: float) -> None:
        """Stop a group."""
        asked = Generate(dropped.group, dropped.attempt, dropped.version)
        for sequence in list(self._left.pop(asked, ())):
            engine = self.engines[sequence.request.engine]
            if engine.is_leaping:
                self._expect(engine.cut(now_s), engine)
            self._dealer.back(engine.number, sequence.prompt)
            # One whose last step runs leaves by itself.
            if sequence not in engine.finished and sequence.state is not State.OVER:
                engine.remove(sequence)

    def hold(self, now_s: float) -> None:
        """Let every engine stand still as soon as its step is done."""
        for engine in self.engines:
            self._held.add(engine.number)
            if engine.is_leaping:
                self._expect(engine.cut(now_s), engine)

    def recompute_s(self, engine: Clocked) -> float:
        """Return how long an engine needs for the keys and values that new weights made invalid."""
        decoding = engine.batcher.decoding
        if not decoding.count:
            return 0.0
        tokens, count, limits = decoding.context, decoding.count, engine.batcher.limits
        mean, steps = tokens / count, ceil(tokens / limits.batch_tokens)
        each = ceil(tokens / steps)
        return steps * engine.cost.step_s(
            prefill_tokens=each,
            prefill_pairs=count * mean * (mean + 1) / 2 / steps,
            sampled=0,
            captured=captured_size(each, 0, limits.graph_tokens),
        )

    def release(self, engine: Clocked, now_s: float) -> None:
        """Let one go on."""
        self._held.discard(engine.number)
        if engine.ends_s == inf:
            self._expect(engine.wake(now_s), engine)

    def _out(self, sequence: Sequence) -> Generate | None:
        """Take a sequence that is done from its group; return the group where it was the last."""
        asked: Generate = sequence.request.asked
        left = self._left.get(asked)
        if left is None:
            return None
        del left[sequence]
        self._dealer.back(sequence.request.engine, sequence.prompt)
        if left:
            return None
        del self._left[asked]
        return asked
