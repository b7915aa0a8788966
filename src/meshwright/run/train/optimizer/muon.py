"""Muon's steps: each matrix of momentum becomes one whose singular values are all near 1.

Keller Jordan's quintic Newton–Schulz iteration (kellerjordan.github.io/posts/muon) in bfloat16:
five steps bring all singular values between about 0.7 and 1.2, by products alone. For R × C
matrices with R ≤ C that is 20·R²·C + 10·R³ FLOPs beside 6·R·C for each token of the batch: 3.3 to
5 × R / tokens of what the matrix takes forward and backward.

A parameter that stacks several matrices (q, k and v; gate and up; experts) is cut into them, and
all matrices of one shape go through the products together.

Shapes: N matrices, R rows, C columns.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch

from meshwright.run.train.optimizer.optimizer_config import MuonScale

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Chosen for the steepest slope at 0, not for convergence to 1."""
BATCH_BYTES = 256 << 20
"""Most bytes of matrices under way at a time; the products need about three times this."""


class MatrixGather(Protocol):
    """Parameters of which ranks hold parts, made whole one by one."""

    def __call__(
        self, parts: Mapping[str, torch.Tensor], work: Callable[[str, torch.Tensor], None], /
    ) -> None:
        """Let `work` change the whole of each by its name, and put this rank's part back."""


@torch.no_grad()
def orthogonalize_(
    directions: Sequence[torch.Tensor],
    parts: Sequence[tuple[int, ...]],
    *,
    scale: MuonScale = "match-adamw",
    steps: int = 5,
) -> None:
    """Turn the momentum of each parameter into Muon's step for it, in place, with its size.

    `parts` has the rows of each matrix that a parameter stacks; empty where it is a single one.
    """
    matrices = sorted(
        (matrix for each, cut in zip(directions, parts, strict=True) for matrix in _cut(each, cut)),
        key=lambda matrix: matrix.shape[-2:],
    )
    for shape, alike in groupby(matrices, key=lambda matrix: matrix.shape[-2:]):
        size = compute_muon_scale(shape, scale)
        for batch in _batches(alike):
            orthogonal = newton_schulz(torch.cat([each.bfloat16() for each in batch]), steps)
            pieces = torch.split(orthogonal, [len(each) for each in batch])
            for into, piece in zip(batch, pieces, strict=True):
                into.copy_(piece.to(into.dtype).mul_(size))


def newton_schulz(x_NRC: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return matrices with the singular vectors of the given ones and singular values near 1."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x = x_NRC.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def compute_muon_scale(shape: Sequence[int], scale: MuonScale) -> float:
    """Return what Muon's step for a matrix of this shape is multiplied by."""
    rows, columns = shape[-2:]
    if scale == "match-adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _cut(direction: torch.Tensor, parts: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return views of N alike matrices each."""
    x_NRC = direction.view(-1, *direction.shape[-2:])
    return torch.split(x_NRC, list(parts), -2) if parts else (x_NRC,)


def _batches(matrices: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    for each in matrices:
        most = max(1, BATCH_BYTES // (2 * each.shape[-2] * each.shape[-1]))
        for piece in torch.split(each, most):
            if batch and sum(len(held) for held in batch) + len(piece) > most:
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch
