"""What software is known to do fills in what a row leaves open, and nothing else."""

from typing import Any

import pytest

from meshwright.predict.validation.training.framework_defaults import (
    apply_framework_defaults,
    split_by_cost,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_gpt

LLAMA = catalog.get_model("llama3.1-8b")


def row(source: str = "", **fields: Any) -> dict[str, Any]:
    return {"source": source, "layout": fields.pop("layout", {}), "micro_batch": 1, **fields}


@pytest.mark.parametrize(
    ("source", "precision", "zero", "expected"),
    [
        ("Megatron-LM README", "bf16", 1, "fp32"),
        ("Megatron-LM README", "fp16", 1, "fp16"),
        ("Megatron-Bridge perf summary", "mxfp8", 1, "bf16"),
        ("NeMo AutoModel", "bf16", 3, "fp32"),
        ("InternEvo", "bf16", 1, "bf16"),
    ],
)
def test_gradients_are_summed_as_the_program_does(
    source: str, precision: Any, zero: int, expected: str
) -> None:
    layout = Layout(dp=8, precision=precision, zero=zero)
    assert apply_framework_defaults(row(source), layout, LLAMA).gradient_precision == expected


@pytest.mark.parametrize(("words", "layers"), [(" of 40 layers", 40), ("", None)])
def test_an_offload_in_the_notes_counts(words: str, layers: int | None) -> None:
    noted = row(notes=f"Recipe X (activation CPU-offload{words})")
    layout = apply_framework_defaults(noted, Layout(dp=8), LLAMA)
    assert (layout.offload, layout.offload_layers) == (("activations",), layers)


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(46, 16, 3), (62, 32, 2), (105, 35, 3)])
def test_unsaid_interleaving_is_the_shallowest_that_divides(
    layers: int, pp: int, chunks: int
) -> None:
    model = build_gpt("x", layers=layers, hidden=64, heads=4, vocab=128)
    told = row(layout={"schedule": "interleaved-1f1b", "vpp": None})
    layout = apply_framework_defaults(told, Layout(pp=pp), model)
    assert (layout.schedule, layout.virtual_stages) == ("interleaved", chunks)
    assert sum(layout.stage_layers or (layers,)) == layers


def test_the_ends_are_lighter_where_that_makes_the_rest_even() -> None:
    model = build_gpt("x", layers=46, hidden=64, heads=4, vocab=128)
    assert apply_framework_defaults(row(), Layout(pp=16), model).stage_layers == (2, *(3,) * 14, 2)


def test_layers_that_divide_are_left_alone() -> None:
    assert apply_framework_defaults(row(), Layout(pp=4), LLAMA).stage_layers is None


def test_pytorchs_pipeline_takes_as_many_microbatches_as_chunks() -> None:
    silent = row(micro_batch=None)
    layout = Layout(pp=4, dp=2, zero=3, global_batch=64)
    assert apply_framework_defaults(silent, layout, LLAMA).microbatch == 8
    assert apply_framework_defaults(row(micro_batch=1), layout, LLAMA).microbatch == 1


def test_cost_counts_the_head_as_a_layer_of_its_size() -> None:
    model = build_gpt("x", layers=12, hidden=64, heads=4, vocab=4 * 12 * 64)
    # The head weighs as much as four layers of 12·64²: two stages share sixteen, nine and three.
    assert split_by_cost(model, 2) == (9, 3)


def test_doing_it_twice_changes_nothing() -> None:
    model: Model = build_gpt("x", layers=46, hidden=64, heads=4, vocab=128)
    told = row("nanotron", layout={"schedule": "interleaved-1f1b"}, micro_batch=None)
    once = apply_framework_defaults(told, Layout(pp=16, dp=2, zero=3, global_batch=96), model)
    assert apply_framework_defaults(told, once, model) == once
