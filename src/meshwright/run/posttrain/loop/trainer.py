"""`LoopTrainer`: the side that trains: weights, optimizer, step, and what is kept of them."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout.controller import Progress
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load
from meshwright.run.posttrain.adapters import DecoderAdapter, adapt, save_adapter
from meshwright.run.posttrain.adapters.adapter import require_targets
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.critic import Critic
from meshwright.run.posttrain.loop.keeping import ADAPTER, Keeping
from meshwright.run.posttrain.loop.offload import Offload
from meshwright.run.posttrain.loop.policy_step import PolicyStep
from meshwright.run.posttrain.loop.prepare import Asked, logprobs
from meshwright.run.posttrain.loop.ranks.meeting import layout_of
from meshwright.run.posttrain.loop.ranks.offering import OfferedByRanks
from meshwright.run.posttrain.loop.ranks.refusals import model_problems
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks
from meshwright.run.posttrain.loop.warm_up import warm_up
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.serve.engine.build import device_of
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.paths import whole_path
from meshwright.run.train.placed_state import State, whole_state
from meshwright.run.train.step import make_decoder
from meshwright.spec.bounds import require
from meshwright.spec.layout.check import tensor_problems
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class LoopTrainer:
    """Everything of a run that is trained: all weights, or an adapter beside them."""

    optimizer: Optimizer
    """Of what is trained, once the run has begun."""

    def __init__(self, settings: LoopSettings, tasks: Tasks, keeping: Keeping) -> None:
        """Make the model with its first weights."""
        self.settings, self._tasks, self.keeping = settings, tasks, keeping
        device = device_of(settings.device)
        self._layout = layout_of(settings, device.type)
        self.decoder: Decoder = make_decoder(
            model_of(settings, tasks), self._layout, device=device, seed=settings.seed
        )
        self.decoder.expect_varied_shapes()
        if settings.model:
            load(self.decoder, settings.model)
        self.device = device
        self.adapter: DecoderAdapter | None = None
        """What is trained beside frozen weights, once the run has begun."""
        self._critic: Critic | None = None
        self._reference: Decoder | None = None
        self._step: PolicyStep | None = None
        self._offload = Offload(device, self._kept)

    def tensors(self) -> dict[str, State]:
        """Return all that a run needs to go on: the tensors themselves."""
        learnt: dict[str, Tensor] = {}
        # Weights that are frozen lie in the model's folder, unless a warm-up made them.
        if self.adapter is None or not self.settings.model:
            learnt |= {f"model.{name}": one for name, one in self.decoder.named_parameters()}
        if self.adapter is not None:
            learnt |= {f"adapter.{name}": one for name, one in self.adapter.named_parameters()}
        mine = whole_state({name: one.detach() for name, one in learnt.items()}, self.optimizer)
        return mine if self._critic is None else mine | self._critic.tensors()

    def begin(self) -> Progress:
        """Go on from the last checkpoint, or warm up and write the first one."""
        keeping, adapted = self.keeping, self.settings.adapter
        # An adapter steps aside for the reference of KL: what it stands beside are the first
        # weights. Where all are trained, these follow from the settings.
        copied = bool(self.settings.objective.kl) and adapted is None
        losses: list[float] = []
        if copied or not keeping.goes_on:
            losses = self._warm_up()
        if copied:
            self._reference = copy.deepcopy(self.decoder).requires_grad_(False)
        if self.settings.objective.advantage == "gae":
            self._critic = self._new_critic()
        if adapted is not None:
            self.adapter = adapt(self.decoder, adapted.lora(), seed=self.settings.seed)
        # After the warm-up, as its float32 masters are of the weights that there are now.
        self.optimizer = self._new_optimizer()
        found = keeping.resume(self.tensors())
        if found is None:
            found = Progress(trained=0, unasked=0)
            keeping.note_warm_up(losses)
            self.save(found)
        longest = self._tasks.max_tokens * self.settings.max_turns
        self._step = PolicyStep(
            self.decoder, self.optimizer, self.settings,
            longest=longest, reference=self._referring(), critic=self._critic,
        )  # fmt: skip
        return found

    def _warm_up(self) -> list[float]:
        settings = self.settings.warm_up
        if not settings.steps:
            return []
        with self.keeping.spans.doing("trainer", "warm up"):
            return warm_up(self.decoder, self._layout, self._tasks.train, settings)

    def _referring(self) -> Decoder | Asked | None:
        """Return what KL is taken to: a copy of the first weights, or those beside the adapter."""
        if self.adapter is None or not self.settings.objective.kl:
            return self._reference
        return self._without_adapter

    def _without_adapter(self, every: Sequence[Rows]) -> list[Tensor]:
        assert self.adapter is not None, "asked of an adapted model alone"
        with self.adapter.disabled():
            return [logprobs(self.decoder, rows) for rows in every]

    def step(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train on groups; say where they carry no signal."""
        assert self._step is not None, "a run begins before it trains"
        assert not self._offload.away, "what is offloaded is loaded before a step"
        with self.keeping.spans.doing("trainer", "train"):
            learned = self._step(step, groups)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        self.keeping.note_silence(step, learned.figures, learned.sentence)
        return learned.figures

    offered: OfferedByRanks | None = None
    """What several ranks have for engines; these read the decoder's own weights here."""

    def lay_out(self, version: int) -> None:
        """Leave the weights where they are: engines of this process and its workers see them."""

    def offload(self) -> None:
        """Leave the device to others, but for the weights, which syncs read."""
        self.optimizer.let_go()
        if self._critic is not None:
            self._critic.optimizer.let_go()
        self._offload.out()

    @property
    def held_bytes(self) -> int:
        """Bytes on the device of what leaves it with `offload`."""
        return self._offload.held_bytes

    def load(self) -> None:
        """Have everything on the device again that a step needs."""
        self._offload.back()

    def _kept(self) -> Iterator[Tensor]:
        """Yield what only steps of training need: of the optimizer, the critic, the reference."""
        yield from self.optimizer.kept()
        if self._critic is not None:
            yield from self._critic.kept()
        if self._reference is not None:
            yield from self._reference.parameters()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint where one is due, whether its tensors lie on the device or not."""
        if self.keeping.due(progress.trained):
            self.keeping.save(self.tensors(), progress)

    def ended(self) -> None:
        """Write the adapter of a model into the run's folder, as PEFT has it."""
        folder, base = self.keeping.folder, self.settings.model
        if self.adapter is not None and folder is not None and base:
            save_adapter(self.adapter, folder / ADAPTER, base=whole_path(base))

    def _new_optimizer(self) -> Optimizer:
        return make_optimizer(
            (self.adapter or self.decoder).named_parameters(),
            self._layout,
            self.settings.optimizer,
            total_steps=self.settings.updates,
            seed=self.settings.seed,
        )

    def _new_critic(self) -> Critic:
        """Return a critic that begins as the policy is now."""
        rule, seed, updates = self.settings.critic_rule, self.settings.seed, self.settings.updates
        return Critic(self.decoder, self._layout, rule, total_steps=updates, seed=seed)


def model_of(settings: LoopSettings, tasks: Tasks) -> Model:
    """Return the model that is trained; one that workers, or ranks, cannot share is refused."""
    if settings.model:
        model = load_config(settings.model)
    elif tasks.vocab is None:
        what = "the task has no vocabulary of its own, and no model is given"
        raise InputError([Problem("model", what, "give a Hugging Face folder")])
    else:
        model = settings.network.model(tasks.vocab)
    require(model_problems(model, settings.layout))
    if settings.adapter is not None:
        require_targets(model, settings.adapter.lora())
    problems = dict.fromkeys(tensor_problems(settings.workers.tp, model))
    require(
        each._replace(where="workers.tp", fix=each.fix.replace("tp=", "workers.tp="))
        for each in problems
    )
    return model
