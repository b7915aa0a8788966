"""What comes out of operations is seen once, in the order they run."""

import pytest

pytest.importorskip("torch", reason="builds modules")

import torch

from meshwright.cli.parity.command import make_optimizer_factory
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.parallel.verify.activation_probe import list_backward_order, list_operations
from meshwright.run.parallel.verify.deviation import join_sequences
from meshwright.run.parallel.verify.verification_step import VerifyCase, run_verify_step
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model

MODEL = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
ASKED = VerifyCase(MODEL, 4, 16, 0, make_optimizer_factory(MODEL))


def test_operations_are_listed_as_a_token_meets_them() -> None:
    assert list_operations(build_decoder(MODEL)) == [
        "embedding",
        "layers.0.mixer",
        "layers.0.mlp",
        "layers.1.mixer",
        "layers.1.mlp",
        "final_norm",
    ]


def test_parameters_are_listed_as_backward_meets_them() -> None:
    names = [name for name, _ in build_decoder(MODEL).named_parameters()]
    assert list_backward_order(names)[:8] == [
        "head.weight",
        "final_norm.weight",
        "layers.1.mlp.down.weight",
        "layers.1.mlp.gate_up.weight",
        "layers.1.norm_mlp.weight",
        "layers.1.mixer.o.weight",
        "layers.1.mixer.qkv.weight",
        "layers.1.norm_mixer.weight",
    ]
    assert list_backward_order(names)[-1] == "embedding.weight"


def test_what_recompute_runs_again_is_not_seen_twice() -> None:
    once = run_verify_step(ASKED, Layout(microbatch=2, precision="fp32"))
    again = run_verify_step(ASKED, Layout(microbatch=2, precision="fp32", recompute="full"))
    assert (
        once.activations.keys()
        == again.activations.keys()
        == set(list_operations(build_decoder(MODEL)))
    )
    for name, by_row in once.activations.items():
        assert sorted(by_row) == sorted(again.activations[name]) == [0, 2]
        assert join_sequences(by_row).shape == (4, 16, 32)
        torch.testing.assert_close(join_sequences(by_row), join_sequences(again.activations[name]))
