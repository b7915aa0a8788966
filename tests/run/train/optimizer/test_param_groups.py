"""Parameters are treated by their names and shapes."""

import pytest

pytest.importorskip("torch", reason="parameters are torch tensors")

import torch

from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig, ParamGroupConfig
from meshwright.run.train.optimizer.param_groups import ParamOptions, get_param_options


def _treated(name: str, *shape: int, muon: bool = False, **settings: object) -> ParamOptions:
    chosen = OptimizerConfig(lr=1e-3, weight_decay=0.1, **settings)  # type: ignore[arg-type]
    return get_param_options(name, torch.empty(shape, device="meta"), chosen, muon=muon)


@pytest.mark.parametrize(
    ("name", "shape", "decay"),
    [
        ("layers.0.mlp.down.weight", (8, 8), 0.1),
        ("embedding.weight", (50, 8), 0.1),
        ("layers.0.norm_mixer.weight", (8,), 0.0),
        ("layers.0.mixer.qkv.bias", (24,), 0.0),
        ("layers.0.mlp.down_bias", (4, 8), 0.0),
        ("layers.0.mixer.sinks", (4,), 0.0),
    ],
)
def test_matrices_decay_and_vectors_norms_and_biases_do_not(
    name: str, shape: tuple[int, ...], decay: float
) -> None:
    assert _treated(name, *shape).weight_decay == decay


def test_embeddings_can_be_spared_from_decay() -> None:
    spared = _treated("embedding.weight", 50, 8, no_weight_decay=("embedding.*",))
    assert spared.weight_decay == 0


def test_the_first_group_that_matches_sets_rate_and_decay() -> None:
    groups = (
        ParamGroupConfig(match="embedding.*", lr_mult=0.5, weight_decay=0.2),
        ParamGroupConfig(match="*", lr_mult=9.0),
    )
    assert _treated("embedding.weight", 50, 8, groups=groups) == ParamOptions(False, 0.5, 0.1)
    assert _treated("head.weight", 50, 8, groups=groups).lr_mult == 9.0


@pytest.mark.parametrize(
    ("name", "shape", "by_muon"),
    [
        ("layers.0.mixer.qkv.weight", (24, 8), True),
        ("layers.0.mlp.gate_up", (4, 16, 8), True),
        ("layers.0.mlp.router.weight", (4, 8), True),
        ("multi_token.0.join.weight", (8, 16), True),
        ("layers.0.mlp.shared_gate.weight", (1, 8), False),
        ("layers.0.mixer.conv.weight", (16, 4), False),
        ("layers.0.norm_mlp.weight", (8,), False),
        ("layers.0.mlp.down_bias", (4, 8), False),
        ("embedding.weight", (50, 8), False),
        ("head.weight", (50, 8), False),
        ("positions.weight", (64, 8), False),
    ],
)
def test_muon_takes_the_matrices_inside_blocks(
    name: str, shape: tuple[int, ...], by_muon: bool
) -> None:
    assert _treated(name, *shape, muon=True).use_muon == by_muon
    assert not _treated(name, *shape, muon=False).use_muon


def test_muon_has_its_own_rate_where_one_is_set() -> None:
    treated = _treated("layers.0.mlp.down.weight", 8, 8, muon=True, muon_lr=2e-2)
    assert treated.lr_mult == pytest.approx(20)
    assert treated.weight_decay == pytest.approx(2.0)
    assert _treated("embedding.weight", 50, 8, muon=True, muon_lr=2e-2).lr_mult == 1.0
