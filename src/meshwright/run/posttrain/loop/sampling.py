"""`Sampling`: the engine with its verifiers, and the way of weights from the trainer to it."""

from collections.abc import Callable, Collection

import torch

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout import engine_share, lends_weights
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.loop.ranks.offering import OfferedByRanks, TakenHere
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks
from meshwright.run.posttrain.rollouts.drawing import Drawing
from meshwright.run.posttrain.rollouts.generate import Answers, Generator, Judging
from meshwright.run.posttrain.rollouts.record import Key, RewardPart, Rollout
from meshwright.run.posttrain.weights.adapter_slot import of_adapter
from meshwright.run.posttrain.weights.serving import EngineWeights
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.posttrain.workers.fleet import Fleet
from meshwright.run.posttrain.workers.hiring import fleet_of
from meshwright.run.serve.engine.settings import AdapterRoom, EngineSettings
from meshwright.run.serve.engine.start import start_engine
from meshwright.run.serve.interface import Memory
from meshwright.run.serve.model.peft_folder import short_name
from meshwright.spec.model import Model
from meshwright.spec.units import format_some

_EVALUATION = 1 << 20
"""Added to the seed where held-out prompts are answered."""


class VerifierFailing(MeshwrightError):
    """Verifiers failed too often for a step to mean anything."""


class _Own:
    """An engine of this process, which takes the weights of a decoder, or of all ranks."""

    def __init__(
        self,
        decoder: Decoder,
        source: str | Model,
        settings: EngineSettings,
        offered: OfferedByRanks | None,
        adapter: DecoderAdapter | None,
    ) -> None:
        lends = lends_weights(adapted=adapter is not None, one_process=True)
        self._level = 0 if lends else 2
        lent = dict(decoder.named_parameters()) if lends else None
        self.engine, self._upkeep, _, _ = start_engine(source, settings, lent=lent)
        self._weights: EngineWeights | TakenHere
        if adapter is not None:
            self._weights = EngineWeights(
                [of_adapter(adapter)], self.engine, self._upkeep, adapter=adapter.settings
            )
        elif offered is None:
            self._weights = EngineWeights([of_decoder(decoder)], self.engine, self._upkeep)
        else:
            self._weights = TakenHere(offered, self.engine, self._upkeep)
        self.take: Callable[[int], None] = self._weights.update
        self.wake: Callable[[Collection[Memory]], None] = self._upkeep.wake

    @property
    def version(self) -> int:
        return self.engine.version

    def sleep(self) -> None:
        self._upkeep.sleep(self._level)

    def close(self) -> None:
        self.engine.close()


class Sampling:
    """Everything that a rollout needs; used by one thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        settings: LoopSettings,
        tasks: Tasks,
        pool: Judging,
        say: Callable[[str], object] = lambda _: None,
        *,
        adapter: DecoderAdapter | None = None,
        offered: OfferedByRanks | None = None,
        room: Callable[[], object] = lambda: None,
    ) -> None:
        """Start an engine here, or workers, that take the weights of a trained decoder.

        Where an `adapter` beside it is trained, versions are the adapter's alone. Where several
        ranks train it, weights are those that they offer, and this is the first's.
        `room` lets the trainer leave its device to engines as far as it can: before they start, as
        their caches fill what is left, and before they wake to answer.
        """
        self._room = room
        room()
        weight, workers = decoder.embedding.weight, settings.workers
        engine_settings = EngineSettings(
            device=str(weight.device),
            precision="fp32" if weight.dtype == torch.float32 else "bf16",
            weights=settings.engine_weights,
            limits=settings.limits,
            memory_share=engine_share(beside=True, by_turns=settings.arrangement.shared),
            graphs=settings.graphs,
            random_weights=bool(settings.model),
            own_adapter=None if adapter is None else _room_for(adapter),
        )
        source = settings.model or decoder.model
        self.device = weight.device
        self._side: _Own | Fleet
        self.engine: Answers
        if workers.count:
            self._side = self.engine = fleet_of(
                decoder, source, engine_settings, workers, threads=settings.threads,
                stall_s=settings.stall_s, exact=not settings.overlaps, say=say, offered=offered,
                adapter=adapter,
            )  # fmt: skip
        else:
            self._side = own = _Own(decoder, source, engine_settings, offered, adapter)
            self.engine = own.engine
        self.pool, self._tasks, self._settings = pool, tasks, settings
        self.generator = Generator(self.engine, tasks.train, pool, tasks.drawing(settings))

    def take(self, trained: int) -> None:
        """Give the engine the trainer's weights, after so many steps; its own wake for them."""
        self.wake(["weights"])
        # To an engine 0 are the weights it was started with, which nobody trained.
        if self._side.version != trained + 1:
            self._side.take(trained + 1)

    def ready(self, trained: int) -> None:
        """Let the engine answer with these weights, whoever has the memory now."""
        self._room()
        self.take(trained)
        self.wake(["cache"])

    @property
    def looks(self) -> int:
        """How often somebody looked after workers, who are ended where they do nothing."""
        return self._side.looks if isinstance(self._side, Fleet) else 0

    def sleep(self) -> None:
        """Give the engine's memory up: that of its cache, and of weights that are old by then."""
        self._side.sleep()

    def wake(self, parts: Collection[Memory]) -> None:
        """Take the memory of some parts again; weights have to follow, before the cache."""
        self._side.wake(parts)

    def close(self) -> None:
        """End what was started."""
        self._side.close()

    def held_out(
        self, prompts: int, *, greedy: bool, hear: Callable[[Rollout], object]
    ) -> list[Rollout]:
        """Answer held-out prompts once each; each answer is heard as soon as it is judged."""
        settings = self._settings
        drawing = Drawing(
            seed=settings.seed + _EVALUATION,
            samples=1,
            max_tokens=self._tasks.max_tokens,
            max_turns=settings.max_turns,
            stop_tokens=self._tasks.stop_tokens,
            temperature=0.0 if greedy else 1.0,
        )
        generator = Generator(self.engine, self._tasks.held_out, self.pool, drawing)
        keys, found = generator.keys(0, range(prompts)), {}
        for rollout in generator.rollouts(keys, version=0):
            hear(rollout)
            found[rollout.key] = rollout
        return [found[key] for key in keys]


def _room_for(adapter: DecoderAdapter) -> AdapterRoom:
    modules = tuple(short_name(name) for name in adapter.pairs)
    return AdapterRoom(rank=adapter.settings.rank, dora=adapter.settings.dora, modules=modules)


class Watching:
    """Looks at verdicts as they come, and ends a run whose verifiers fail."""

    def __init__(
        self, most: int, say: Callable[[str], object], name: Callable[[Key], str] = str
    ) -> None:
        """Let so many verdicts of a step fail, and say so of each; `name` is what it is called."""
        self._most, self._say, self._name, self._failed = most, say, name, 0
        self._said_cut = False

    def begin(self) -> None:
        """Begin a step."""
        self._failed = 0

    def hear(self, rollout: Rollout) -> None:
        """Look at a rollout.

        Raises:
            VerifierFailing: where too many have failed; it names the verifier.
        """
        for part in rollout.rewards:
            if part.is_judged:
                continue
            who = self._name(rollout.key)
            self._say(f"{who}: {part.name}: {part.outcome}: {part.reason}")
            self._count(part)
        if rollout.ending == "turns" and not rollout.rewards and not self._said_cut:
            self._said_cut = True
            who, turns = self._name(rollout.key), format_some(len(rollout.turns), "turn")
            what = f"{who}: its environment had not ended after {turns} and gave no reward"
            self._say(f"{what}, which counts as 0: raise max_turns, or reward every turn")
        if rollout.error:
            self._say(f"{self._name(rollout.key)}: {rollout.error}")

    def recall(self, rollout: Rollout) -> None:
        """Count a rollout of an earlier sitting, which has said what there is to say of it.

        Raises:
            VerifierFailing: where too many have failed.
        """
        for part in rollout.rewards:
            if not part.is_judged:
                self._count(part)

    def _count(self, part: RewardPart) -> None:
        self._failed += 1
        if self._failed > self._most:
            what = f"{self._failed} verdicts of one step failed, {self._most} may"
            raise VerifierFailing(f"{what}; the last one, of {part.name}: {part.reason}")
