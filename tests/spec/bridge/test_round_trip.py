"""The law of every bridge: what was exported comes back, but for the fields that are listed."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.bridge import BRIDGES
from meshwright.spec.bridge.spec_diff import diff_layouts, diff_models
from meshwright.spec.layout.choices import (
    AXIS_ORDERS,
    CHOICES,
    MULTI_CHUNK_SCHEDULES,
    OFFLOADS,
    RECOMPUTE_OPS,
    V_SCHEDULES,
)
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    NormSpec,
    Rotary,
)
from meshwright.spec.model.block import NormKind

DEGREES = st.sampled_from([1, 1, 2, 3, 4, 8])


def choices(field: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(sorted(CHOICES[field]))


def subsets(values: frozenset[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(values)), unique=True, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any sound layout, the strange ones included."""
    tp, cp, pp, dp = (draw(DEGREES) for _ in range(4))
    schedule = draw(choices("schedule"))
    virtual = 1
    if pp > 1 and schedule in MULTI_CHUNK_SCHEDULES:
        virtual = 2 if schedule in V_SCHEDULES else draw(st.sampled_from([1, 2, 3]))
    microbatch = draw(st.sampled_from([1, 2, 4]))
    recompute = draw(choices("recompute"))
    offload = draw(subsets(OFFLOADS))
    divisors = [d for d in range(1, dp * cp + 1) if dp * cp % d == 0]
    fields: dict[str, Any] = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "virtual_stages": virtual, "schedule": schedule,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "stage_layers": draw(st.none() | st.lists(
            st.integers(0, 5), min_size=pp * virtual, max_size=pp * virtual).map(tuple)),
        "shard": draw(st.none() | st.sampled_from(divisors)),
        "ep": draw(st.sampled_from([1, 1, 2, 4])),
        "expert_tp": draw(st.none() | st.sampled_from([1, tp])),
        "zero": draw(st.integers(0, 3)),
        "recompute": recompute,
        "recompute_ops": draw(subsets(RECOMPUTE_OPS)) if recompute == "selective" else (),
        "recompute_layers": draw(st.none() | st.integers(0, 4)) if recompute != "none" else None,
        "microbatch": microbatch,
        "global_batch": draw(st.none() | st.integers(1, 8).map(lambda k: k * dp * microbatch)),
        "offload": offload,
        "offload_layers": draw(st.none() | st.integers(0, 4)) if "activations" in offload else None,
        "order": draw(st.just("tp-cp-ep-dp-pp") | st.sampled_from(sorted(AXIS_ORDERS))),
    }  # fmt: skip
    for field in ("precision", "optimizer", "cp_kind", "master_precision", "gradient_precision",
                  "moment_precision"):  # fmt: skip
        fields[field] = draw(choices(field))
    for field in ("gradients", "parameters", "tp", "pp", "ep"):
        fields[f"overlap_{field}"] = draw(st.booleans())
    try:
        return Layout(**fields)
    except InputError:
        assume(False)
        raise


@st.composite
def rotaries(draw: st.DrawFn) -> Rotary:
    """Rotary settings of the kinds that real models have."""
    kind = draw(st.sampled_from(["none", "linear", "llama3", "yarn", "mrope", "dynamic"]))
    fields: dict[str, Any] = {
        "theta": draw(st.sampled_from([10000.0, 500000.0, 1e6, 12345.5])),
        "fraction": draw(st.sampled_from([1.0, 0.5])),
        "interleaved": draw(st.booleans()),
        "scaling": kind,
        "factor": 1.0 if kind in {"none", "mrope"} else draw(st.sampled_from([2.0, 8.0, 2.5])),
    }
    if kind in {"llama3", "yarn"}:
        fields["original_positions"] = draw(st.sampled_from([4096, 8192]))
    if kind == "yarn":
        fields["mscale"] = draw(st.sampled_from([None, 1.0, 0.7]))
        fields["beta_fast"] = draw(st.sampled_from([None, 32.0, 16.0]))
        fields["truncate"] = draw(st.booleans())
    if kind == "mrope":
        fields["sections"] = (16, 24, 24)
    return Rotary(**fields)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionSpec:
    kv = draw(st.sampled_from([1, 2, 8]))
    return AttentionSpec(
        heads=8,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([64, 128])),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head", "full", "l2"])),
        window=draw(st.sampled_from([None, None, 128])),
        rotary=draw(st.none() | rotaries()),
        sinks=draw(st.booleans()),
        gate=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.1])),
    )


@st.composite
def feedforwards(draw: st.DrawFn) -> MLPSpec | MoESpec:
    shape: dict[str, Any] = {
        "width": draw(st.sampled_from([256, 1408])),
        "gated": draw(st.booleans()),
        "activation": draw(
            st.sampled_from(["silu", "gelu", "gelu-tanh", "relu2", "swiglu-clamped"])
        ),
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return MLPSpec(**shape)
    return MoESpec(
        count=16,
        top_k=draw(st.sampled_from([1, 2])),
        shared_width=draw(st.sampled_from([0, 512])),
        shared_gate=draw(st.booleans()),
        router_bias=draw(st.sampled_from(["none", "linear", "balance"])),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=draw(st.sampled_from([1, 4])),
        latent=draw(st.sampled_from([None, 64])),
        **shape,
    )


LATENT = LatentAttentionSpec(heads=8, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32)
DELTA = GatedDeltaNetSpec(key_heads=4, value_heads=8, key_dim=32, value_dim=32)
MAMBA = Mamba2Spec(heads=16, head_dim=64, state_dim=128, groups=8)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any mixture of layers, more mixed than real models are."""
    others: tuple[Mixer, ...] = (LATENT, DELTA, MAMBA)
    mixers: st.SearchStrategy[Mixer] = attentions() | st.sampled_from(others)
    blocks = []
    for index in range(draw(st.integers(1, 3))):
        mixer = draw(mixers)
        mlp = draw(feedforwards())
        part = draw(st.sampled_from(["both", "both", "both", "mixer", "mlp"]))
        blocks.append(
            BlockSpec(
                name=f"b{index}",
                mixer=mixer if part != "mlp" else None,
                mlp=mlp if part != "mixer" else None,
                norms=draw(st.sampled_from(["pre", "pre", "sandwich"])),
            )
        )
    names = [block.name for block in blocks]
    order = draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))
    kinds: tuple[NormKind, ...] = ("rms", "layer", "layer-plain")
    kind = draw(st.sampled_from(kinds))
    heads = st.builds(MtpSpec, depth=st.integers(1, 2), block=st.sampled_from(names))
    return Model(
        name="drawn",
        hidden=512,
        vocab=draw(st.sampled_from([1000, 32000, 50257])),
        blocks=tuple(blocks),
        pattern=" ".join(order),
        norm=NormSpec(kind=kind, bias=kind == "layer", unit_offset=draw(st.booleans())),
        tied=draw(st.booleans()),
        positions=draw(st.sampled_from(["rotary", "rotary", "learned", "alibi", "none"])),
        max_positions=draw(st.sampled_from([2048, 4096])),
        head_bias=draw(st.booleans()),
        multi_token=draw(st.none() | heads),
    )


@pytest.mark.parametrize("name", BRIDGES)
@given(layout=layouts())
@settings(deadline=None, max_examples=150)
def test_every_layout_comes_back_but_for_what_is_listed(name: str, layout: Layout) -> None:
    exported = BRIDGES[name].export_config(layout)
    listed = {problem.where for problem in exported.unexpressed}
    back = BRIDGES[name].import_config(exported.text, gpus=layout.gpus)
    different = {f"layout.{d.path}" for d in diff_layouts(layout, back.layout)}
    assert different <= listed


@pytest.mark.parametrize("name", BRIDGES)
@given(layout=layouts(), model=models())
@settings(deadline=None, max_examples=120)
def test_every_model_comes_back_but_for_what_is_listed(
    name: str, layout: Layout, model: Model
) -> None:
    exported = BRIDGES[name].export_config(layout, model, sequence_length=4096)
    listed = {problem.where for problem in exported.unexpressed}
    back = BRIDGES[name].import_config(exported.text, gpus=layout.gpus)
    if back.model is None:
        assert "model" in listed
    else:
        different = {f"model.{d.path}" for d in diff_models(model, back.model)}
        assert different <= listed
    assert back.sequence_length == 4096 or "sequence_length" in listed
    assert all(problem.fix for problem in exported.unexpressed)


@pytest.mark.parametrize("name", BRIDGES)
@given(layout=layouts())
@settings(deadline=None, max_examples=50)
def test_exporting_what_was_imported_changes_nothing_more(name: str, layout: Layout) -> None:
    bridge = BRIDGES[name]
    once = bridge.import_config(bridge.export_config(layout).text, gpus=layout.gpus).layout
    twice = bridge.import_config(bridge.export_config(once).text, gpus=once.gpus).layout
    assert diff_layouts(once, twice) == ()


@pytest.mark.parametrize("name", BRIDGES)
@given(layout=layouts())
@settings(deadline=None, max_examples=50)
def test_every_unexpressed_field_says_what_and_why(name: str, layout: Layout) -> None:
    for problem in BRIDGES[name].export_config(layout).unexpressed:
        assert problem.where.startswith("layout.")
        assert "cannot be said" in problem.what
        assert ": " in problem.what, problem
        assert problem.fix, problem
