"""`RolloutBackend`: the engine with its verifiers, and the weight sync from the trainer to it."""

from collections.abc import Callable, Collection

import torch

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout import get_engine_memory_fraction, shares_weights
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.lora import DecoderAdapter
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.distributed.weight_sender import (
    DistributedWeightSender,
    LocalWeightReceiver,
)
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments
from meshwright.run.posttrain.rollout.generator import (
    RewardProvider,
    RolloutGenerator,
    RolloutInference,
)
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey
from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
from meshwright.run.posttrain.weight_sync.adapter_slot import collect_adapter_weights
from meshwright.run.posttrain.weight_sync.engine_weights import EngineWeightUpdater
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.posttrain.workers.pool_startup import start_worker_pool
from meshwright.run.posttrain.workers.worker_pool import RolloutWorkerPool
from meshwright.run.serve.engine.engine_config import EngineConfig, LoRASlotConfig
from meshwright.run.serve.engine.startup import start_engine
from meshwright.run.serve.engine_client import MemoryTag
from meshwright.run.serve.model.peft_checkpoint import strip_module_prefix
from meshwright.spec.model import Model
from meshwright.spec.units import format_quantity

_EVALUATION = 1 << 20
"""Added to the seed where held-out prompts are answered."""


class VerifierFailureError(MeshwrightError):
    """Verifiers failed too often for a step to mean anything."""


class _Own:
    """An engine of this process, which takes the weights of a decoder, or of all ranks."""

    def __init__(
        self,
        decoder: Decoder,
        source: str | Model,
        settings: EngineConfig,
        sender: DistributedWeightSender | None,
        adapter: DecoderAdapter | None,
    ) -> None:
        lends = shares_weights(adapted=adapter is not None, one_process=True)
        self._level = 0 if lends else 2
        lent = dict(decoder.named_parameters()) if lends else None
        self.engine, self._upkeep, _, _ = start_engine(source, settings, lent=lent)
        self._weights: EngineWeightUpdater | LocalWeightReceiver
        if adapter is not None:
            self._weights = EngineWeightUpdater(
                [collect_adapter_weights(adapter)],
                self.engine,
                self._upkeep,
                adapter=adapter.config,
            )
        elif sender is None:
            self._weights = EngineWeightUpdater(
                [collect_decoder_weights(decoder)], self.engine, self._upkeep
            )
        else:
            self._weights = LocalWeightReceiver(sender, self.engine, self._upkeep)
        self.load_version: Callable[[int], None] = self._weights.update
        self.wake_up: Callable[[Collection[MemoryTag]], None] = self._upkeep.wake_up

    @property
    def weights_version(self) -> int:
        return self.engine.weights_version

    def sleep(self) -> None:
        self._upkeep.sleep(self._level)

    def close(self) -> None:
        self.engine.close()


class RolloutBackend:
    """Everything that a rollout needs; used by one thread at a time."""

    def __init__(
        self,
        decoder: Decoder,
        settings: RLConfig,
        tasks: TaskEnvironments,
        reward_provider: RewardProvider,
        say: Callable[[str], object] = lambda _: None,
        *,
        adapter: DecoderAdapter | None = None,
        sender: DistributedWeightSender | None = None,
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
        engine_settings = EngineConfig(
            device=str(weight.device),
            dtype="fp32" if weight.dtype == torch.float32 else "bf16",
            quantization=settings.engine_weights,
            scheduler_config=settings.scheduler_config,
            gpu_memory_utilization=get_engine_memory_fraction(
                beside=True, by_turns=settings.rollout_policy.colocated
            ),
            cuda_graphs=settings.cuda_graphs,
            random_weights=bool(settings.model),
            trained_lora_slot=None if adapter is None else _room_for(adapter),
        )
        source = settings.model or decoder.model
        self.device = weight.device
        self._side: _Own | RolloutWorkerPool
        self.engine: RolloutInference
        if workers.num_workers:
            self._side = self.engine = start_worker_pool(
                decoder, source, engine_settings, workers, threads=settings.threads,
                stall_timeout_s=settings.stall_timeout_s, exact=not settings.overlaps, say=say,
                sender=sender,
                adapter=adapter,
            )  # fmt: skip
        else:
            self._side = own = _Own(decoder, source, engine_settings, sender, adapter)
            self.engine = own.engine
        self.reward_provider, self._tasks, self._settings = reward_provider, tasks, settings
        self.generator = RolloutGenerator(
            self.engine, tasks.train, reward_provider, tasks.build_rollout_config(settings)
        )

    def load_weights(self, trained: int) -> None:
        """Give the engine the trainer's weights, after so many steps; its own wake for them."""
        self.wake_up(["weights"])
        # To an engine 0 are the weights it was started with, which nobody trained.
        if self._side.weights_version != trained + 1:
            self._side.load_version(trained + 1)

    def prepare_weights(self, trained: int) -> None:
        """Let the engine answer with these weights, whoever has the memory now."""
        self._room()
        self.load_weights(trained)
        self.wake_up(["cache"])

    @property
    def health_check_count(self) -> int:
        """How often somebody looked after workers, who are ended where they do nothing."""
        return self._side.health_check_count if isinstance(self._side, RolloutWorkerPool) else 0

    def sleep(self) -> None:
        """Give the engine's memory up: that of its cache, and of weights that are old by then."""
        self._side.sleep()

    def wake_up(self, parts: Collection[MemoryTag]) -> None:
        """Take the memory of some parts again; weights have to follow, before the cache."""
        self._side.wake_up(parts)

    def close(self) -> None:
        """End what was started."""
        self._side.close()

    def evaluate_held_out(
        self, prompts: int, *, greedy: bool, hear: Callable[[Rollout], object]
    ) -> list[Rollout]:
        """Answer held-out prompts once each; each answer is heard as soon as it is judged."""
        settings = self._settings
        drawing = RolloutConfig(
            seed=settings.seed + _EVALUATION,
            group_size=1,
            max_tokens=self._tasks.max_tokens,
            max_turns=settings.max_turns,
            stop_token_ids=self._tasks.stop_token_ids,
            temperature=0.0 if greedy else 1.0,
        )
        generator = RolloutGenerator(
            self.engine, self._tasks.held_out, self.reward_provider, drawing
        )
        keys, found = generator.build_keys(0, range(prompts)), {}
        for rollout in generator.generate_rollouts(keys, version=0):
            hear(rollout)
            found[rollout.key] = rollout
        return [found[key] for key in keys]


def _room_for(adapter: DecoderAdapter) -> LoRASlotConfig:
    modules = tuple(strip_module_prefix(name) for name in adapter.lora_pairs)
    return LoRASlotConfig(
        max_rank=adapter.config.rank, dora=adapter.config.dora, target_modules=modules
    )


class VerifierFailureMonitor:
    """Looks at verdicts as they come, and ends a run whose verifiers fail."""

    def __init__(
        self, most: int, say: Callable[[str], object], name: Callable[[RolloutKey], str] = str
    ) -> None:
        """Let so many verdicts of a step fail, and say so of each; `name` is what it is called."""
        self._most, self._say, self._name, self._failed = most, say, name, 0
        self._said_cut = False

    def start_step(self) -> None:
        """Begin a step."""
        self._failed = 0

    def observe(self, rollout: Rollout) -> None:
        """Look at a rollout.

        Raises:
            VerifierFailureError: where too many have failed; it names the verifier.
        """
        for part in rollout.rewards:
            if part.has_reward:
                continue
            who = self._name(rollout.key)
            self._say(f"{who}: {part.name}: {part.outcome}: {part.reason}")
            self._count(part)
        if rollout.ending == "max_turns" and not rollout.rewards and not self._said_cut:
            self._said_cut = True
            who, turns = self._name(rollout.key), format_quantity(len(rollout.turns), "turn")
            what = f"{who}: its environment had not ended after {turns} and gave no reward"
            self._say(f"{what}, which counts as 0: raise max_turns, or reward every turn")
        if rollout.error:
            self._say(f"{self._name(rollout.key)}: {rollout.error}")

    def count_resumed(self, rollout: Rollout) -> None:
        """Count a rollout of an earlier session, which has said what there is to say of it.

        Raises:
            VerifierFailureError: where too many have failed.
        """
        for part in rollout.rewards:
            if not part.has_reward:
                self._count(part)

    def _count(self, part: RewardComponent) -> None:
        self._failed += 1
        if self._failed > self._most:
            what = f"{self._failed} verdicts of one step failed, {self._most} may"
            raise VerifierFailureError(f"{what}; the last one, of {part.name}: {part.reason}")
