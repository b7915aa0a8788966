"""Muon's steps have singular values near 1, for each matrix a parameter stacks."""

import pytest

pytest.importorskip("torch", reason="parameters are torch tensors")

import torch

from meshwright.run.train.optimizer import muon
from meshwright.run.train.optimizer.muon import compute_muon_scale, newton_schulz, orthogonalize_
from meshwright.run.train.optimizer.optimizer_config import MuonScale


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, ...]) -> None:
    x = _drawn(*shape)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.mT @ newton_schulz(x).float() @ v.mT
    diagonal = inside.diagonal(dim1=-2, dim2=-1)
    assert float(diagonal.min()) > 0.3
    assert float(diagonal.max()) < 1.3
    assert float((inside - torch.diag_embed(diagonal)).abs().max()) < 0.1


def test_stacked_matrices_are_each_orthogonalised_alone() -> None:
    stacked = _drawn(2, 24, 16)
    alone = [each.clone() for each in torch.split(stacked, [16, 4, 4], dim=1)]
    orthogonalize_([stacked], [(16, 4, 4)])
    orthogonalize_(alone, [()] * 3)
    torch.testing.assert_close(stacked, torch.cat(alone, 1), rtol=2e-2, atol=2e-2)


def test_matrices_of_one_shape_from_many_parameters_come_back_to_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muon, "BATCH_BYTES", 3 * 2 * 8 * 16)  # three matrices at a time
    shapes = [(8, 16), (4, 8, 16), (16, 8), (8, 16)]
    many = [_drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    alone = [each.clone() for each in many]
    orthogonalize_(many, [()] * 4)
    for one, other in zip(alone, many, strict=True):
        orthogonalize_([one], [()])
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("scale", "shape", "size"),
    [
        ("match-adamw", (100, 400), 4.0),
        ("match-adamw", (400, 100), 4.0),
        ("spectral", (400, 100), 2.0),
        ("spectral", (100, 400), 1.0),
    ],
)
def test_step_sizes_are_the_published_ones(
    scale: MuonScale, shape: tuple[int, int], size: float
) -> None:
    assert compute_muon_scale(shape, scale) == pytest.approx(size)


def test_a_matrix_of_zeros_gives_no_step() -> None:
    zeros = torch.zeros(4, 8)
    orthogonalize_([zeros], [()])
    assert not zeros.any()
