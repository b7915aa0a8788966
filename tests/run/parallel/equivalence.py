"""Trains small models under a layout on gloo ranks, and holds every tensor against one device.

The reference is the same model on one process in float32. Each rank compares what it holds with
the same part of the reference: losses, the first step's gradients, and weights after some steps.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.build import DEFAULTS, Options, build
from meshwright.run.nn.initialise import materialise
from meshwright.run.parallel.buckets import BUCKET_BYTES
from meshwright.run.parallel.chosen import Algorithms
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.experts import sum_loads
from meshwright.run.parallel.matrices import WholeMatrices
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.runner import Runner
from meshwright.run.parallel.shards import Lie
from meshwright.run.parallel.spread import Spread, spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.parallel.sync import make_sync
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.optimizer.parts import matrices_for_muon, matrix_parts
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

STEPS = 3
LENGTH = 16
GRADIENT_TOLERANCE = 2e-5
"""Of a gradient, relative to its norm: float32 sums in another order."""
WEIGHT_TOLERANCE = 2e-5
"""Of the weights after the steps, relative to how far they moved plus their norm's rounding."""
BALANCE_RATE = 1e-3
"""By which a bias that balances experts moves in a step."""
SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0, clip=0.05)


@dataclass(frozen=True)
class Case:
    """A model under a layout."""

    name: str
    model: Model
    layout: Layout
    sequences: int = 8
    packed: bool = False
    options: Options = DEFAULTS
    bucket_bytes: int = BUCKET_BYTES
    algorithms: Algorithms | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    device: str = "cpu"
    """Where ranks and reference compute; several ranks may share a GPU."""
    weight_tolerance: float = WEIGHT_TOLERANCE


@dataclass(frozen=True)
class Run:
    """What training leaves behind."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]


@lru_cache(maxsize=64)
def sequences(vocab: int, count: int, step: int, *, packed: bool) -> Microbatch:
    """Return the sequences of a step, the same on every rank; packed ones have documents."""
    made = torch.Generator().manual_seed(step)
    rows = torch.randint(0, vocab, (count, LENGTH + 1), generator=made)
    labels = rows[:, 1:].clone()
    documents = None
    if packed:
        lengths = [(5, LENGTH - 5) if row % 2 else (LENGTH - 3, 3) for row in range(count)]
        documents = Documents.of_lengths(lengths)
        labels.view(-1)[documents.starts[1:].long() - 1] = IGNORED
    return Microbatch(rows[:, :-1].clone(), labels, None, documents)


def cut(batch: Microbatch, first: int, count: int, device: str = "cpu") -> Microbatch:
    """Return some sequences of a step."""
    rows = slice(first, first + count)
    documents = None
    if batch.documents is not None:
        # Two documents to a sequence.
        starts = batch.documents.starts[2 * first : 2 * (first + count) + 1] - first * LENGTH
        documents = Documents(starts.to(device), batch.documents.longest)
    tokens, labels = (each[rows].to(device) for each in (batch.tokens_BT, batch.labels_BT))
    return Microbatch(tokens, labels, None, documents)


def reference(case: Case) -> Run:
    """Train on one device."""
    decoder = build(case.model, dtype=torch.float32, options=case.options)
    materialise(decoder, case.device, seed=1)
    optimizer = _optimizer(decoder.named_parameters(), case, matrix_parts(decoder))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batch = sequences(case.model.vocab, case.sequences, step, packed=case.packed)
        count = case.layout.microbatch
        share = 1 / int((batch.labels_BT != IGNORED).sum())
        total = 0.0
        for first in range(0, case.sequences, count):
            part = cut(batch, first, count, case.device)
            loss = decoder.loss(part.tokens_BT, part.labels_BT, documents=part.documents)
            (loss.total * share).backward()  # type: ignore[no-untyped-call]
            total += float(loss.nats_sum.detach()) * share
        losses.append(total)
        if step == 0:
            gradients = {
                name: each.grad.to("cpu", copy=True)
                for name, each in decoder.named_parameters()
                if each.grad is not None
            }
        report = optimizer.step(SETTINGS.lr)
        for experts in decoder.experts():
            experts.update_balance(BALANCE_RATE)
        norms.append(float(report.norm))
        optimizer.zero_grad()
    weights = {
        name: each.detach().to("cpu", copy=True) for name, each in decoder.named_parameters()
    }
    return Run(tuple(losses), tuple(norms), gradients, weights)


def _optimizer(
    parameters: object,
    case: Case,
    parts: dict[str, tuple[int, ...]],
    matrices: WholeMatrices | None = None,
) -> Optimizer:
    layout = Layout(precision="fp32", master_precision="none", optimizer=case.optimizer)
    return make_optimizer(
        parameters,  # type: ignore[arg-type]
        layout,
        SETTINGS,
        total_steps=STEPS,
        seed=1,
        parts=parts,
        matrices=matrices,
    )


def compare(case: Case, wanted: Run) -> list[str]:
    """Train on this rank's part; return what differs from one device."""
    torch.set_num_threads(1)
    mesh = Mesh(case.layout, device=case.device, algorithms=case.algorithms)
    mine = spread(case.model, mesh, dtype=torch.float32, seed=1, options=case.options)
    runner, sync = Runner(mine), make_sync(mine, bucket_bytes=case.bucket_bytes)
    whole = matrices_for_muon(mine, sync) if case.optimizer == "muon" else None
    parts_of = matrix_parts(build(case.model, options=case.options))
    optimizer = _optimizer(sync.named_parameters(), case, parts_of, whole)
    wrong: list[str] = []
    for step in range(STEPS):
        batch = sequences(case.model.vocab, case.sequences, step, packed=case.packed)
        share = 1 / int((batch.labels_BT != IGNORED).sum())
        each = case.sequences // case.layout.dp
        parts = [
            cut(batch, mesh.place.dp * each + first, case.layout.microbatch, case.device)
            for first in range(0, each, case.layout.microbatch)
        ]
        sync.begin()
        sums = runner(parts, share, sync.last)
        # Ranks of a tensor-parallel group have the same loss, those of earlier stages none.
        total = mesh.world.all_reduce(sums.nats.reshape(1) * share) / case.layout.tp
        gradients = sync.gradients()
        if abs(float(total) - wanted.losses[step]) > 1e-5 * wanted.losses[step]:
            wrong.append(f"loss of step {step}: {float(total):.7f}, {wanted.losses[step]:.7f}")
        if step == 0:
            wrong += _other_gradients(gradients, sync.lies(), wanted.gradients)
        report = optimizer.step(SETTINGS.lr, norm=sync.norm(), gradients=gradients)
        if abs(float(report.norm) - wanted.norms[step]) > 1e-4 * wanted.norms[step]:
            wrong.append(f"norm of step {step}: {float(report.norm)}, {wanted.norms[step]}")
        sum_loads(mine.decoder, mesh)
        for experts in mine.decoder.experts():
            experts.update_balance(BALANCE_RATE)
        sync.finish()
    with sync.gathered():
        wrong += _other_weights(mine, wanted.weights, case.weight_tolerance)
    return wrong


def _other_gradients(
    found: dict[str, Tensor], lies: dict[str, Lie], wanted: dict[str, Tensor]
) -> list[str]:
    """Return which of the gradients that this rank updates by differ from one device's."""
    wrong = []
    for name, gradient in found.items():
        whole, (holding, start, stop) = wanted[name], lies[name]
        expected = holding.take(whole).reshape(-1)[start:stop]
        error = float(
            (gradient.cpu().reshape(-1) - expected).norm() / whole.norm().clamp(min=1e-12)
        )
        if not error <= GRADIENT_TOLERANCE:
            wrong.append(f"gradient of {name}: relative error {error:.2e}")
    return wrong


def _other_weights(mine: Spread, wanted: dict[str, Tensor], tolerance: float) -> list[str]:
    wrong = []
    for name, parameter in mine.decoder.named_parameters():
        whole = wanted[name]
        expected = mine.holdings[name].take(whole)
        error = float((parameter.detach().cpu() - expected).norm() / whole.norm().clamp(min=1e-12))
        if not error <= tolerance:
            wrong.append(f"weight of {name}: relative error {error:.2e}")
    return wrong


def _all(cases: Sequence[Case], wanted: bytes) -> list[list[str]]:
    runs: list[Run] = pickle.loads(wanted)
    return [compare(case, run) for case, run in zip(cases, runs, strict=True)]


def check(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Run cases of one world size; return by case what differs, on any rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small make several wait for each other
    wanted = [reference(case) for case in cases]
    torch.set_num_threads(threads)
    ranks = cases[0].layout.gpus
    # As bytes: tensors would each travel by a file, of which a process may open only so many.
    found = launch(ranks, _all, tuple(cases), pickle.dumps(wanted), timeout_s=300)
    return {
        case.name: [
            f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines[index]
        ]
        for index, case in enumerate(cases)
    }
