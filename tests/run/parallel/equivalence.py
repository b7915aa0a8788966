"""Trains small models under a layout on gloo ranks, and holds every tensor against one device.

The reference is the same model on one process in float32. Each rank compares what it holds with
the same part of the reference: losses and norms of every step, the first one's gradients, and how
far weights moved in all. What should be compared and is on no rank is a fault; see `nearness`.

AdamW's `eps` is that of `mw parity`, a tenth of an average clipped gradient: with a smaller one an
update is the gradient's sign, which rounding flips where a gradient is nearly nought.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder_builder import DEFAULT_BUILD_OPTIONS, BuildOptions, build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.algorithm_selection import AlgorithmsByGroup
from meshwright.run.parallel.expert_parallel.token_dispatcher import all_reduce_expert_load
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.parallel.verify.verification_step import CLIP_GRAD, compute_verify_eps
from meshwright.run.parallel.zero.bucket_shard import ShardRange
from meshwright.run.parallel.zero.buckets import BUCKET_BYTES
from meshwright.run.parallel.zero.gradient_sync import Sync, make_gradient_sync
from meshwright.run.parallel.zero.matrix_gather import MatrixGatherer
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.optimizer.stacked_matrices import (
    list_stacked_matrix_rows,
    make_matrix_gatherer,
)
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, count_parameters
from tests.run.parallel.nearness import (
    TOLERANCES,
    Compared,
    Error,
    Kind,
    Measured,
    differences,
    faults,
    held,
)

STEPS = 2
"""The first finds the order of gradients; the second exchanges by it and goes on from moments."""
LENGTH = 16
BALANCE_RATE = 1e-3
"""By which a bias that balances experts moves in a step."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """A model under a layout."""

    name: str
    model: Model
    layout: Layout
    sequences: int = 8
    packed: bool = False
    options: BuildOptions = DEFAULT_BUILD_OPTIONS
    bucket_bytes: int = BUCKET_BYTES
    algorithms: AlgorithmsByGroup | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    device: str = "cpu"
    """Where ranks and reference compute; several ranks may share a GPU."""
    tolerances: Mapping[Kind, float] = field(default_factory=dict)
    """Those that are not the usual ones."""


@dataclass(frozen=True)
class Run:
    """What training leaves behind."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    """Of the first step; noughts for what had none."""
    before: dict[str, Tensor]
    """Weights that the run began with."""
    after: dict[str, Tensor]

    @property
    def moved(self) -> dict[str, Tensor]:
        """How far each parameter moved."""
        return {name: self.after[name] - self.before[name] for name in self.after}


@lru_cache(maxsize=64)
def sequences(vocab: int, count: int, step: int, *, packed: bool) -> Microbatch:
    """Return the sequences of a step, the same on every rank; packed ones have documents."""
    made = torch.Generator().manual_seed(step)
    rows = torch.randint(0, vocab, (count, LENGTH + 1), generator=made)
    labels = rows[:, 1:].clone()
    documents = None
    if packed:
        lengths = [(5, LENGTH - 5) if row % 2 else (LENGTH - 3, 3) for row in range(count)]
        documents = PackedSequences.from_lengths(lengths)
        labels.view(-1)[documents.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    return Microbatch(rows[:, :-1].clone(), labels, None, documents)


def cut(batch: Microbatch, first: int, count: int, device: str = "cpu") -> Microbatch:
    """Return some sequences of a step."""
    rows = slice(first, first + count)
    documents = None
    if batch.documents is not None:
        # Two documents to a sequence.
        starts = batch.documents.cu_seqlens[2 * first : 2 * (first + count) + 1] - first * LENGTH
        documents = PackedSequences(starts.to(device), batch.documents.max_length)
    tokens, labels = (each[rows].to(device) for each in (batch.tokens_BT, batch.labels_BT))
    return Microbatch(tokens, labels, None, documents)


def reference(case: Case) -> Run:
    """Train on one device."""
    decoder = build_decoder(case.model, dtype=torch.float32, options=case.options)
    materialize(decoder, case.device, seed=1)
    optimizer = _optimizer(decoder.named_parameters(), case, list_stacked_matrix_rows(decoder))
    before = _copied(decoder)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batch = sequences(case.model.vocab, case.sequences, step, packed=case.packed)
        count = case.layout.microbatch
        share = 1 / int((batch.labels_BT != IGNORE_INDEX).sum())
        total = 0.0
        for first in range(0, case.sequences, count):
            part = cut(batch, first, count, case.device)
            loss = decoder.loss(part.tokens_BT, part.labels_BT, documents=part.documents)
            (loss.total * share).backward()  # type: ignore[no-untyped-call]
            total += float(loss.loss_sum.detach()) * share
        losses.append(total)
        if step == 0:
            gradients = {
                name: torch.zeros(each.shape) if each.grad is None else each.grad.cpu().clone()
                for name, each in decoder.named_parameters()
                if each.requires_grad
            }
        report = optimizer.step(LEARNING_RATE)
        for experts in decoder.iter_moe_layers():
            experts.update_expert_bias(BALANCE_RATE)
        norms.append(float(report.grad_norm))
        optimizer.zero_grad()
    return Run(tuple(losses), tuple(norms), gradients, before, _copied(decoder))


def _copied(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().to("cpu", copy=True) for name, each in decoder.named_parameters()}


def _optimizer(
    parameters: object,
    case: Case,
    parts: dict[str, tuple[int, ...]],
    matrices: MatrixGatherer | None = None,
) -> Optimizer:
    layout = Layout(precision="fp32", master_precision="none", optimizer=case.optimizer)
    eps = compute_verify_eps(count_parameters(case.model).total)
    settings = OptimizerConfig(lr=LEARNING_RATE, warmup_steps=0, clip_grad=CLIP_GRAD, eps=eps)
    return make_optimizer(
        parameters,  # type: ignore[arg-type]
        layout,
        settings,
        total_steps=STEPS,
        seed=1,
        parts=parts,
        matrices=matrices,
    )


def compare(case: Case, wanted: Run) -> Measured:
    """Train on this rank's part; return how far it is from one device."""
    torch.set_num_threads(1)
    mesh = Mesh(case.layout, device=case.device, algorithms=case.algorithms)
    mine = shard_model(case.model, mesh, dtype=torch.float32, seed=1, options=case.options)
    runner, sync = (
        ForwardBackwardRunner(mine),
        make_gradient_sync(mine, bucket_bytes=case.bucket_bytes),
    )
    whole = make_matrix_gatherer(mine, sync) if case.optimizer == "muon" else None
    parts_of = list_stacked_matrix_rows(build_decoder(case.model, options=case.options))
    optimizer = _optimizer(sync.named_parameters(), case, parts_of, whole)
    measured = Measured([])
    for step in range(STEPS):
        batch = sequences(case.model.vocab, case.sequences, step, packed=case.packed)
        share = 1 / int((batch.labels_BT != IGNORE_INDEX).sum())
        each = case.sequences // case.layout.dp
        parts = [
            cut(batch, mesh.coordinate.dp * each + first, case.layout.microbatch, case.device)
            for first in range(0, each, case.layout.microbatch)
        ]
        sync.begin_step()
        sums = runner(parts, share, sync.mark_last_backward)
        # Ranks of a tensor-parallel group have the same loss, those of earlier stages none.
        loss = mesh.world.all_reduce(sums.loss_sum.reshape(1) * share) / case.layout.tp
        gradients = sync.reduced_gradients()
        if step == 0:
            compared = _gradients(gradients, sync)
            measured.errors.extend(differences("gradient", compared, wanted.gradients))
            measured.held["gradient"] = held(compared)
        report = optimizer.step(LEARNING_RATE, norm=sync.grad_norm(), gradients=gradients)
        for kind, found, expected in (
            ("loss", loss, wanted.losses[step]),
            ("norm", report.grad_norm, wanted.norms[step]),
        ):
            off = abs(float(found) / expected - 1)
            measured.errors.append(Error(kind, f"step {step}", off))  # type: ignore[arg-type]
        all_reduce_expert_load(mine.decoder, mesh)
        for experts in mine.decoder.iter_moe_layers():
            experts.update_expert_bias(BALANCE_RATE)
        sync.zero_grads_and_unshard()
    with sync.unsharded_parameters():
        compared = _moves(mine, wanted.before)
    measured.errors.extend(differences("update", compared, wanted.moved, wanted.before))
    measured.held["update"] = held(compared)
    return measured


def _gradients(found: dict[str, Tensor], sync: Sync) -> dict[str, Compared]:
    """Return the gradients of everything that this rank updates."""
    lies = sync.shard_ranges()
    updated = [name for name, each in sync.named_parameters() if each.requires_grad]
    return {name: Compared(found.get(name), lies[name]) for name in updated}


def _moves(mine: ShardedModel, before: dict[str, Tensor]) -> dict[str, Compared]:
    """Return how far the weights that this rank computes with moved."""
    moved = {}
    for name, parameter in mine.decoder.named_parameters():
        holding, here = mine.shard_specs[name], parameter.detach().cpu()
        moved[name] = Compared(
            here - holding.select_local(before[name]), ShardRange(holding, 0, here.numel())
        )
    return moved


def _all(cases: Sequence[Case], wanted: bytes) -> list[Measured]:
    runs: list[Run] = pickle.loads(wanted)
    return [compare(case, run) for case, run in zip(cases, runs, strict=True)]


def measure(cases: Sequence[Case]) -> tuple[list[Run], list[list[Measured]]]:
    """Run cases of one world size; return what one device did, and by rank how far others are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small make several wait for each other
    wanted = [reference(case) for case in cases]
    torch.set_num_threads(threads)
    ranks = cases[0].layout.gpus
    # As bytes: tensors would each travel by a file, of which a process may open only so many.
    return wanted, spawn_ranks(ranks, _all, tuple(cases), pickle.dumps(wanted), timeout_s=300)


def check(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Run cases of one world size; return by case what differs, on any rank."""
    runs, found = measure(cases)
    return {
        case.name: list(
            faults(
                [rank[index] for rank in found],
                {"gradient": run.gradients, "update": run.moved},
                {**TOLERANCES, **case.tolerances},
            )
        )
        for index, (case, run) in enumerate(zip(cases, runs, strict=True))
    }
