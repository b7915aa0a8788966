"""`RLTrainer`: the side that trains: weights, optimizer, step, and what is kept of them."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout.controller import RolloutProgress
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.lora import DecoderAdapter, attach_adapter, save_adapter
from meshwright.run.posttrain.lora.decoder_adapter import validate_targets
from meshwright.run.posttrain.rl.config.compatibility import find_model_problems
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.rendezvous import build_trainer_layout
from meshwright.run.posttrain.rl.run_state import ADAPTER, RLRunState
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments
from meshwright.run.posttrain.rl.trainer.critic import Critic
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.offload import HostOffload
from meshwright.run.posttrain.rl.trainer.policy_step import PolicyStep
from meshwright.run.posttrain.rl.trainer.step_preparation import (
    BatchEvaluator,
    compute_policy_logprobs,
)
from meshwright.run.posttrain.rl.trainer.warmup import run_warmup
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.run.serve.engine.runner_builder import resolve_device
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.run.train.run_folder.state_tensors import StateTensor, make_unsharded_state
from meshwright.spec.field_checks import raise_problems
from meshwright.spec.layout.constraints import check_tensor_parallel
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class RLTrainer:
    """Everything of a run that is trained: all weights, or an adapter beside them."""

    optimizer: Optimizer
    """Of what is trained, once the run has begun."""

    def __init__(self, config: RLConfig, tasks: TaskEnvironments, run_state: RLRunState) -> None:
        """Make the model with its first weights."""
        self.config, self._tasks, self.run_state = config, tasks, run_state
        device = resolve_device(config.device)
        self._layout = build_trainer_layout(config, device.type)
        self.decoder: Decoder = make_decoder(
            load_policy_model(config, tasks), self._layout, device=device, seed=config.seed
        )
        self.decoder.set_dynamic_shapes()
        if config.model:
            load_hf_checkpoint(self.decoder, config.model)
        self.device = device
        self.adapter: DecoderAdapter | None = None
        """What is trained beside frozen weights, once the run has begun."""
        self._critic: Critic | None = None
        self._reference: Decoder | None = None
        self._step: PolicyStep | None = None
        self._offload = HostOffload(device, self._kept)

    def tensors(self) -> dict[str, StateTensor]:
        """Return all that a run needs to go on: the tensors themselves."""
        learnt: dict[str, Tensor] = {}
        # Weights that are frozen lie in the model's folder, unless a warm-up made them.
        if self.adapter is None or not self.config.model:
            learnt |= {f"model.{name}": one for name, one in self.decoder.named_parameters()}
        if self.adapter is not None:
            learnt |= {f"adapter.{name}": one for name, one in self.adapter.named_parameters()}
        mine = make_unsharded_state(
            {name: one.detach() for name, one in learnt.items()}, self.optimizer
        )
        return mine if self._critic is None else mine | self._critic.tensors()

    def resume_or_initialize(self) -> RolloutProgress:
        """Go on from the last checkpoint, or warm up and write the first one."""
        keeping, adapted = self.run_state, self.config.adapter
        # An adapter steps aside for the reference of KL: what it stands beside are the first
        # weights. Where all are trained, these follow from the settings.
        copied = bool(self.config.objective.kl_coef) and adapted is None
        losses: list[float] = []
        if copied or not keeping.has_checkpoint:
            losses = self._warm_up()
        if copied:
            self._reference = copy.deepcopy(self.decoder).requires_grad_(False)
        if self.config.objective.adv_estimator == "gae":
            self._critic = self._new_critic()
        if adapted is not None:
            self.adapter = attach_adapter(
                self.decoder, adapted.to_lora_config(), seed=self.config.seed
            )
        # After the warm-up, as its float32 masters are of the weights that there are now.
        self.optimizer = self._new_optimizer()
        found = keeping.resume(self.tensors())
        if found is None:
            found = RolloutProgress(trained_steps=0, next_group=0)
            keeping.note_warmup(losses)
            self.save(found)
        longest = self._tasks.max_tokens * self.config.max_turns
        self._step = PolicyStep(
            self.decoder, self.optimizer, self.config,
            longest=longest, reference=self._referring(), critic=self._critic,
        )  # fmt: skip
        return found

    def _warm_up(self) -> list[float]:
        settings = self.config.warm_up
        if not settings.steps:
            return []
        with self.run_state.timeline.record("trainer", "warm up"):
            return run_warmup(self.decoder, self._layout, self._tasks.train, settings)

    def _referring(self) -> Decoder | BatchEvaluator | None:
        """Return what KL is taken to: a copy of the first weights, or those beside the adapter."""
        if self.adapter is None or not self.config.objective.kl_coef:
            return self._reference
        return self._without_adapter

    def _without_adapter(self, every: Sequence[RolloutMicrobatch]) -> list[Tensor]:
        assert self.adapter is not None, "asked of an adapted model alone"
        with self.adapter.disable_adapter():
            return [compute_policy_logprobs(self.decoder, rows) for rows in every]

    def step(self, step: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train on groups; say where they carry no signal."""
        assert self._step is not None, "a run begins before it trains"
        assert not self._offload.is_offloaded, "what is offloaded is loaded before a step"
        with self.run_state.timeline.record("trainer", "train"):
            learned = self._step(step, groups)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        self.run_state.note_without_signal(step, learned.metrics, learned.signal_warning)
        return learned.metrics

    weight_source: None = None
    """What several ranks have for engines; these read the decoder's own weights here."""

    def publish_weights(self, version: int) -> None:
        """Leave the weights where they are: engines of this process and its workers see them."""

    def offload(self) -> None:
        """Leave the device to others, but for the weights, which syncs read."""
        self.optimizer.release_tensors()
        if self._critic is not None:
            self._critic.optimizer.release_tensors()
        self._offload.offload()

    @property
    def offloadable_bytes(self) -> int:
        """Bytes on the device of what leaves it with `offload`."""
        return self._offload.device_bytes

    def reload(self) -> None:
        """Have everything on the device again that a step needs."""
        self._offload.reload()

    def _kept(self) -> Iterator[Tensor]:
        """Yield what only steps of training need: of the optimizer, the critic, the reference."""
        yield from self.optimizer.iter_state_tensors()
        if self._critic is not None:
            yield from self._critic.iter_state_tensors()
        if self._reference is not None:
            yield from self._reference.parameters()

    def save(self, progress: RolloutProgress) -> None:
        """Write a checkpoint where one is due, whether its tensors lie on the device or not."""
        if self.run_state.is_checkpoint_due(progress.trained_steps):
            self.run_state.save(self.tensors(), progress)

    def save_final(self) -> None:
        """Write the adapter of a model into the run's folder, as PEFT has it."""
        folder, base = self.run_state.folder, self.config.model
        if self.adapter is not None and folder is not None and base:
            save_adapter(self.adapter, folder / ADAPTER, base=make_absolute_path(base))

    def _new_optimizer(self) -> Optimizer:
        return make_optimizer(
            (self.adapter or self.decoder).named_parameters(),
            self._layout,
            self.config.optimizer,
            total_steps=self.config.total_updates,
            seed=self.config.seed,
        )

    def _new_critic(self) -> Critic:
        """Return a critic that begins as the policy is now."""
        rule, seed, updates = (
            self.config.critic_optimizer,
            self.config.seed,
            self.config.total_updates,
        )
        return Critic(self.decoder, self._layout, rule, total_steps=updates, seed=seed)


def load_policy_model(settings: RLConfig, tasks: TaskEnvironments) -> Model:
    """Return the model that is trained; one that workers, or ranks, cannot share is refused."""
    if settings.model:
        model = load_config(settings.model)
    elif tasks.vocab_size is None:
        what = "the task has no vocabulary of its own, and no model is given"
        raise InputError([Problem("model", what, "give a Hugging Face folder")])
    else:
        model = settings.network.model(tasks.vocab_size)
    raise_problems(find_model_problems(model, settings.layout))
    if settings.adapter is not None:
        validate_targets(model, settings.adapter.to_lora_config())
    problems = dict.fromkeys(check_tensor_parallel(settings.workers.tensor_parallel_size, model))
    raise_problems(
        each._replace(
            where="workers.tensor_parallel_size",
            fix=each.fix.replace("tp=", "workers.tensor_parallel_size="),
        )
        for each in problems
    )
    return model
