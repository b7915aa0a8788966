"""`RolloutEngines`: engines on a virtual clock whose requests are the samples of groups."""

from collections.abc import Callable
from math import ceil, inf

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import AssignmentPolicy, DropAction, EngineAssigner, GenerateAction
from meshwright.policy.serving.graph_sizes import find_padded_size
from meshwright.policy.serving.scheduler import Sequence, SequenceStatus
from meshwright.predict.rl.rl_setup import GroupLengths, RolloutBatch
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, count_kv_blocks
from meshwright.predict.serving.sim.simulated_engine import EngineSetup, SimulatedEngine

ScheduleWakeup = Callable[[float, SimulatedEngine], None]
"""Called with when an engine wants to be looked at."""


def require_kv_room(engines: ReplicaPool, rounds: RolloutBatch) -> float:
    """Return how long the mean sample of a step is, where engines have room for any.

    Raises:
        InputError: where an engine's weights leave none.
    """
    drawn = [rounds.sample_group(group) for group in range(rounds.prompts_per_step)]
    mean = sum(one.tokens for one in drawn) / (rounds.group_size * len(drawn))
    try:
        count_kv_blocks(engines.replica, engines.scheduler_config, mean)
    except InputError as error:
        fix = "use engines of more GPUs with --tp"
        if engines.replica.quantization.weights in ("fp32", "bf16", "fp16"):
            fix += ", or --precision fp8"
        if engines.replica.other_process_bytes:
            fix += ", or let the trainer keep less there: more GPUs, or turns (colocated)"
        what = f"an engine's {error.problems[0].what}"
        raise InputError([Problem("engines", what, fix)]) from None
    return mean


class _Sample:
    """Whose answer a sequence is."""

    __slots__ = ("asked", "engine")

    def __init__(self, asked: GenerateAction, engine: int) -> None:
        self.asked, self.engine = asked, engine


class RolloutEngines:
    """All of them, with the groups they have."""

    def __init__(
        self, stations: list[EngineSetup], expect: ScheduleWakeup, deals: AssignmentPolicy
    ) -> None:
        self.engines = [SimulatedEngine(one, number) for number, one in enumerate(stations)]
        self.block_size = stations[0].scheduler_config.block_size
        self._expect = expect
        self._dealer = EngineAssigner(len(stations), deals)
        self._left: dict[GenerateAction, dict[Sequence, None]] = {}
        """Groups with their sequences that are not done."""
        self._held: set[int] = set()
        """Engines that stand still while weights come in."""

    def submit(self, asked: GenerateAction, drawn: GroupLengths, now_s: float) -> None:
        """Let the samples of a group wait at engines, each where it is dealt to."""
        keys = [
            (asked.group, asked.version, at) for at in range(drawn.prompt_tokens // self.block_size)
        ]
        left: dict[Sequence, None] = {}
        for answer in drawn.response_tokens:
            place = self._dealer.assign(asked.group, drawn.prompt_tokens)
            sequence = Sequence(
                drawn.prompt_tokens, answer, state=_Sample(asked, place), block_hashes=list(keys)
            )
            left[sequence] = None
            engine = self.engines[place]
            if engine.is_leaping:
                self._expect(engine.truncate_steps(now_s), engine)
            engine.add_sequence(sequence, now_s)
            if engine.ends_s == inf and place not in self._held:
                self._expect(engine.wake_up(now_s), engine)
        self._left[asked] = left

    def collect_finished(self, engine: SimulatedEngine, now_s: float) -> list[GenerateAction]:
        """Go on after a step; return the groups that it completed."""
        done = []
        if not engine.is_waking:
            engine.finish_step()
            for sequence in engine.finished:
                asked = self._out(sequence)
                if asked is not None:
                    done.append(asked)
        if engine.number in self._held:
            engine.ends_s, engine.is_waking = inf, False
        else:
            self._expect(engine.start_step(now_s), engine)
        return done

    def abort(self, dropped: DropAction, now_s: float) -> None:
        """Stop a group."""
        asked = GenerateAction(dropped.group, dropped.attempt, dropped.version)
        for sequence in list(self._left.pop(asked, ())):
            engine = self.engines[sequence.state.engine]
            if engine.is_leaping:
                self._expect(engine.truncate_steps(now_s), engine)
            self._dealer.release(engine.number, sequence.num_prompt_tokens)
            # One whose last step runs leaves by itself.
            if sequence not in engine.finished and sequence.status is not SequenceStatus.FINISHED:
                engine.remove(sequence)

    def pause(self, now_s: float) -> None:
        """Let every engine stand still as soon as its step is done."""
        for engine in self.engines:
            self._held.add(engine.number)
            if engine.is_leaping:
                self._expect(engine.truncate_steps(now_s), engine)

    def recompute_s(self, engine: SimulatedEngine) -> float:
        """Return how long an engine needs for the keys and values that new weights made invalid."""
        decoding = engine.scheduler.decode_set
        if not decoding.num_sequences:
            return 0.0
        tokens, count, limits = (
            decoding.attended_tokens,
            decoding.num_sequences,
            engine.scheduler.config,
        )
        mean, steps = tokens / count, ceil(tokens / limits.max_num_batched_tokens)
        each = ceil(tokens / steps)
        return steps * engine.cost.step_s(
            prefill_tokens=each,
            prefill_pairs=count * mean * (mean + 1) / 2 / steps,
            sampled=0,
            captured=find_padded_size(each, 0, limits.max_cudagraph_capture_size),
        )

    def resume(self, engine: SimulatedEngine, now_s: float) -> None:
        """Let one go on."""
        self._held.discard(engine.number)
        if engine.ends_s == inf:
            self._expect(engine.wake_up(now_s), engine)

    def _out(self, sequence: Sequence) -> GenerateAction | None:
        """Take a sequence that is done from its group; return the group where it was the last."""
        asked: GenerateAction = sequence.state.asked
        left = self._left.get(asked)
        if left is None:
            return None
        del left[sequence]
        self._dealer.release(sequence.state.engine, sequence.num_prompt_tokens)
        if left:
            return None
        del self._left[asked]
        return asked
