"""Fused products are cut into the matrices that a model is described by."""

import pytest

pytest.importorskip("torch", reason="decoders are torch modules")

import torch
from torch import nn

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.train.optimizer.stacked_matrices import list_stacked_matrix_rows
from meshwright.spec.catalog import get_model
from meshwright.spec.model import token_mixers


class _Mixer(nn.Module):
    """Stands for a mixer: the description it was built from, and its fused products."""

    def __init__(self, spec: object, **rows: int) -> None:
        super().__init__()
        self.spec = spec
        for name, number in rows.items():
            setattr(self, name, nn.Linear(16, number, bias=False, device="meta"))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 12, 16, device="meta"))
        self.down = nn.Parameter(torch.empty(4, 16, 6, device="meta"))


def _parts(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return list_stacked_matrix_rows(nn.ModuleDict({"m": module}))


def test_attention_has_queries_keys_and_values() -> None:
    spec = token_mixers.AttentionSpec(heads=4, kv_heads=2, head_dim=8)
    assert _parts(_Mixer(spec, qkv=64, o=16)) == {"m.qkv.weight": (32, 16, 16)}


def test_a_gate_of_the_output_is_a_matrix_too() -> None:
    spec = token_mixers.AttentionSpec(heads=4, kv_heads=2, head_dim=8, gate=True)
    assert _parts(_Mixer(spec, qkv=96)) == {"m.qkv.weight": (32, 16, 16, 32)}


def test_a_slice_of_the_heads_is_cut_alike() -> None:
    spec = token_mixers.AttentionSpec(heads=4, kv_heads=2, head_dim=8)
    assert _parts(_Mixer(spec, qkv=32)) == {"m.qkv.weight": (16, 8, 8)}


def test_gate_and_up_are_halves_of_experts_and_dense_layers() -> None:
    assert _parts(_Experts()) == {"m.gate_up": (6, 6)}
    assert _parts(_Mixer(None, gate_up=20)) == {"m.gate_up.weight": (10, 10)}


@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "nemotron-h-8b"]
)
def test_rows_of_a_models_matrices_add_up_to_those_of_its_products(name: str) -> None:
    decoder = build_decoder(get_model(name))
    parameters, parts = dict(decoder.named_parameters()), list_stacked_matrix_rows(decoder)
    assert parts
    for fused, rows in parts.items():
        assert sum(rows) == parameters[fused].shape[-2], fused
