"""Layouts that compute as one device does agree; of others it is said where they begin not to."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch.distributed as dist
from torch import Tensor, nn

from meshwright.cli.parity.command import make_optimizer_factory
from meshwright.errors import InputError
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.verify.deviation import (
    find_first_divergence,
    get_execution_order,
    list_deviations,
)
from meshwright.run.parallel.verify.layout_verification import run_baseline, verify_layouts
from meshwright.run.parallel.verify.shrunk_model import shrink_model
from meshwright.run.parallel.verify.verification_step import (
    OptimizerStep,
    OptimizerStepFactory,
    VerifyCase,
    run_verify_step,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Precision

SEQUENCE = Layout(tp=2, sequence_parallel=True, microbatch=4)


def asked(name: str, layouts: list[Layout]) -> tuple[VerifyCase, tuple[Layout, ...]]:
    small = shrink_model(catalog.get_model(name), layouts, sequence_length=32)
    return VerifyCase(small.model, 8, 32, 0, make_optimizer_factory(small.model)), small.layouts


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("llama3.1-8b", Layout(tp=2, sequence_parallel=True, cp=2, zero=3), "fp32"),
        ("deepseek-v3", Layout(pp=2, dp=2, ep=2, zero=1, stage_layers=(30, 31)), "fp32"),
        ("gpt-oss-20b", Layout(dp=2, ep=2, recompute="full"), "bf16"),
        ("gemma2-2b", Layout(pp=2, tp=2, schedule="1f1b"), "fp16"),
        ("llama3.1-8b", Layout(tp=2, dp=2, zero=1), "fp8-rowwise"),
        ("olmo2-32b", Layout(tp=2, sequence_parallel=True), "bf16"),
    ],
)
def test_sound_layouts_agree(name: str, layout: Layout, precision: Precision) -> None:
    small, layouts = asked(name, [layout])
    (verdict,) = verify_layouts(small, layouts, precision)
    assert verdict.failure == ""
    assert verdict.first_divergence is None
    assert verdict.passed
    assert [each.kind for each in verdict.worst_deviations] == ["activation", "gradient", "update"]
    # Every parameter and every operation was looked at, on some rank.
    order = get_execution_order(small.model)
    assert {(each.kind, each.name) for each in verdict.deviations} >= {
        key for key in order if not key[1].endswith("balance") or key[0] != "gradient"
    }


def scale_a_sum(mine: ShardedModel) -> None:
    """Let rank 1 read a little more than the sum of what both have."""
    mixer = mine.decoder.get_submodule("layers.1.mixer")
    hooks = mixer.parallel_hooks
    assert hooks is not None

    class Wrong:
        gathers_input = hooks.gathers_input  # type: ignore[union-attr]
        gather_input = hooks.gather_input  # type: ignore[union-attr]
        regather_input = hooks.regather_input  # type: ignore[union-attr]

        def reduce_output(self, y: Tensor) -> Tensor:
            left: Tensor = hooks.reduce_output(y)  # type: ignore[union-attr,operator]
            return left * 1.001 if mine.mesh.rank == 1 else left

    mixer.parallel_hooks = Wrong()  # type: ignore[assignment]


def forget_a_norm(mine: ShardedModel) -> None:
    """Leave each rank with the gradient of its own tokens for one norm."""
    name = "layers.1.norm_mlp.weight"
    mine.shard_specs[name] = replace(mine.shard_specs[name], grad_sum_group="")


def hurried(
    make: OptimizerStepFactory, named: Iterator[tuple[str, nn.Parameter]], layout: Layout
) -> OptimizerStep:
    """Let rank 1 take larger steps."""
    updates = make(named, layout)
    step = updates.step

    def wrong(lr: float, **given: object) -> object:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return step(lr * (1 + 0.01 * rank), **given)  # type: ignore[arg-type]

    updates.step = wrong  # type: ignore[method-assign]
    return updates


def test_a_wrong_sum_is_named_as_the_first_operation() -> None:
    small, layouts = asked("llama3.1-8b", [SEQUENCE])
    (verdict,) = verify_layouts(small, layouts, "fp32", inject_fault=scale_a_sum)
    assert not verdict.passed
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.kind, verdict.first_divergence.name) == (
        "activation",
        "layers.1.mixer",
    )
    assert verdict.first_divergence.ranks == (1,)
    # What comes after is off as well, and what came before is not.
    off = {
        each.name for each in verdict.deviations if each.exceeds_limit and each.kind == "activation"
    }
    assert "layers.1.mlp" in off
    assert "layers.0.mlp" not in off


@pytest.mark.parametrize("precision", ["fp32", "fp8-rowwise"])
def test_a_gradient_that_is_not_reduced_is_named(precision: Precision) -> None:
    small, layouts = asked("llama3.1-8b", [SEQUENCE])
    (verdict,) = verify_layouts(small, layouts, precision, inject_fault=forget_a_norm)
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.kind, verdict.first_divergence.name) == (
        "gradient",
        "layers.1.norm_mlp.weight",
    )
    assert verdict.first_divergence.ranks == (0, 1)


def test_an_update_by_another_rate_is_named() -> None:
    small, layouts = asked("llama3.1-8b", [Layout(dp=2)])
    wrong = VerifyCase(small.model, 8, 32, 0, partial(hurried, small.make_optimizer_step))
    (verdict,) = verify_layouts(wrong, layouts, "fp32")
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.kind == "update"
    assert verdict.first_divergence.ranks == (1,)
    assert not any(each.exceeds_limit for each in verdict.deviations if each.kind == "gradient")


def raise_on_one(mine: ShardedModel) -> None:
    """Fail on rank 1."""
    if mine.mesh.rank == 1:
        raise ValueError("no memory left")


def test_a_layout_that_does_not_run_says_which_rank_failed() -> None:
    small, layouts = asked("gpt2", [Layout(dp=2)])
    (verdict,) = verify_layouts(small, layouts, "fp32", inject_fault=raise_on_one)
    assert not verdict.passed
    assert verdict.failure.startswith("rank 1: no memory left")


def test_more_ranks_than_a_machine_runs_are_refused() -> None:
    small, layouts = asked("gpt2", [Layout(dp=16)])
    with pytest.raises(InputError, match="16 ranks"):
        verify_layouts(small, layouts, "fp32")
    small, layouts = asked("gpt2", [Layout(dp=2)])
    with pytest.raises(InputError, match="mxfp8"):
        verify_layouts(small, layouts, "mxfp8")


def test_a_format_that_one_device_overflows_is_refused() -> None:
    small, _ = asked("olmo2-7b", [Layout(dp=2)])
    with pytest.raises(InputError, match="not finite in fp16"):
        run_baseline(small, "fp16")


def test_nothing_is_let_through_that_is_not_a_number() -> None:
    small, (layout,) = asked("gpt2", [Layout(precision="fp32")])
    base = run_baseline(small, "fp32")
    mine = run_verify_step(small, layout)
    mine.gradients["final_norm.weight"][0] = float("nan")
    found = list_deviations(small.model, layout, 0, mine, base)
    first = find_first_divergence(found, get_execution_order(small.model))
    assert first is not None
    assert (first.kind, first.name) == ("gradient", "final_norm.weight")
