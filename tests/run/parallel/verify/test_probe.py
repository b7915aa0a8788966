"""What comes out of operations is seen once, in the order they run."""

import pytest

pytest.importorskip("torch", reason="builds modules")

import torch

from meshwright.cli.verify import updates_for
from meshwright.run.nn.build import build
from meshwright.run.parallel.verify.compare import joined
from meshwright.run.parallel.verify.probe import backward_order, in_order
from meshwright.run.parallel.verify.step import Asked, run_step
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder

MODEL = decoder("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
ASKED = Asked(MODEL, 4, 16, 0, updates_for(MODEL))


def test_operations_are_listed_as_a_token_meets_them() -> None:
    assert in_order(build(MODEL)) == [
        "embedding",
        "layers.0.mixer",
        "layers.0.mlp",
        "layers.1.mixer",
        "layers.1.mlp",
        "final_norm",
    ]


def test_parameters_are_listed_as_backward_meets_them() -> None:
    names = [name for name, _ in build(MODEL).named_parameters()]
    assert backward_order(names)[:8] == [
        "head.weight",
        "final_norm.weight",
        "layers.1.mlp.down.weight",
        "layers.1.mlp.gate_up.weight",
        "layers.1.norm_mlp.weight",
        "layers.1.mixer.o.weight",
        "layers.1.mixer.qkv.weight",
        "layers.1.norm_mixer.weight",
    ]
    assert backward_order(names)[-1] == "embedding.weight"


def test_what_recompute_runs_again_is_not_seen_twice() -> None:
    once = run_step(ASKED, Layout(microbatch=2, precision="fp32"))
    again = run_step(ASKED, Layout(microbatch=2, precision="fp32", recompute="full"))
    assert once.activations.keys() == again.activations.keys() == set(in_order(build(MODEL)))
    for name, by_row in once.activations.items():
        assert sorted(by_row) == sorted(again.activations[name]) == [0, 2]
        assert joined(by_row).shape == (4, 16, 32)
        torch.testing.assert_close(joined(by_row), joined(again.activations[name]))
