"""`Layout.check` names every violated constraint, and its fixes mend them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MoESpec,
    build_decoder_model,
    build_gpt,
)
from meshwright.spec.workload import LoRASpec, TrainingWorkload

DENSE = build_decoder_model(
    "dense", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256
)
SPARSE = build_decoder_model(
    "sparse", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000,
    experts=MoESpec(count=8, top_k=2, width=14336),
)  # fmt: skip
LATENT = Model(
    name="latent",
    hidden=1024,
    vocab=1000,
    pattern="4*a 4*m",
    blocks=(
        BlockSpec(
            name="a",
            mixer=LatentAttentionSpec(heads=16, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
            mlp=MLPSpec(width=1024),
        ),
        BlockSpec(name="m", mixer=Mamba2Spec(heads=16, head_dim=64, state_dim=64, groups=4)),
    ),
)
CLUSTER = catalog.get_cluster("h100-superpod").with_gpus(1024)
STEP = TrainingWorkload(tokens=10**9, sequence_length=8192, global_batch=512)


def violated(
    model: Model = DENSE,
    cluster: Cluster = CLUSTER,
    workload: TrainingWorkload | None = None,
    **values: Any,
) -> dict[str, Problem]:
    return {p.where: p for p in Layout(**values).check(model, cluster, workload)}


def test_a_sound_layout_violates_nothing() -> None:
    assert not violated(
        tp=8, pp=4, dp=32, sequence_parallel=True, zero=1, workload=STEP, microbatch=1
    )


@pytest.mark.parametrize(
    ("model", "values", "field", "fix"),
    [
        (DENSE, {"tp": 48, "zero": 3}, "tp", "tp=32"),
        (DENSE, {"tp": 8, "pp": 3, "dp": 8, "zero": 1}, "stage_layers", "27,27,26"),
        (DENSE, {"tp": 8, "pp": 6, "dp": 4, "zero": 1}, "stage_layers", "13,13,14,14,13,13"),
        (DENSE, {"tp": 8, "pp": 4, "dp": 8, "ep": 2, "zero": 1}, "ep", "ep=1"),
        (DENSE, {"tp": 8, "pp": 64, "virtual_stages": 2, "schedule": "interleaved"}, "pp", "pp="),
        (DENSE, {"tp": 8, "pp": 2, "stage_layers": (40, 41), "dp": 8}, "stage_layers", "80"),
        (SPARSE, {"dp": 16, "ep": 16, "zero": 3}, "ep", "ep=8"),
        (SPARSE, {"dp": 3, "ep": 1, "expert_tp": 3, "zero": 3}, "expert_tp", "expert_tp=2"),
        (DENSE, {"tp": 8, "dp": 256, "zero": 1}, "dp", "dp=128"),
        (DENSE, {"tp": 8, "pp": 4, "precision": "nvfp4"}, "precision", ""),
        (DENSE, {}, "memory", "tp or pp"),
        (DENSE, {"dp": 16}, "memory", "zero=1"),
        (LATENT, {"tp": 8}, "tp", "tp=4"),
    ],
)  # fmt: skip
def test_each_constraint_has_its_field_and_fix(
    model: Model, values: dict[str, Any], field: str, fix: str
) -> None:
    problem = violated(model, **values)[field]
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tp": 8, "dp": 24, "zero": 1, "pp": 4}, "global_batch"),
        ({"tp": 8, "pp": 4, "dp": 32, "global_batch": 1024, "zero": 1}, "global_batch"),
        (
            {"tp": 8, "pp": 5, "dp": 16, "virtual_stages": 4, "schedule": "interleaved", "zero": 1},
            "global_batch",
        ),
        ({"tp": 8, "pp": 8, "dp": 16, "schedule": "dualpipe", "microbatch": 4}, "global_batch"),
        ({"tp": 8, "pp": 4, "cp": 3, "dp": 8, "zero": 1}, "sequence_length"),
    ],
)
def test_the_workload_is_held_against_too(values: dict[str, Any], field: str) -> None:
    assert field in violated(workload=STEP, **values)


def test_learned_positions_end() -> None:
    model = build_gpt("g", layers=4, hidden=256, heads=4, vocab=1000, max_positions=2048)
    assert "sequence_length" in violated(model, workload=STEP)
    assert "sequence_length" not in violated(SPARSE, workload=STEP, dp=8, zero=3)


def test_ulysses_must_divide_the_heads() -> None:
    assert "cp" in violated(tp=8, cp=16, cp_kind="ulysses", zero=3)
    assert "cp" not in violated(tp=8, cp=8, cp_kind="ulysses", zero=3)


@pytest.mark.parametrize("op", ["moe", "mla_up_proj", "shared_experts"])
def test_recompute_of_what_a_model_lacks_is_refused(op: str) -> None:
    layout: dict[str, Any] = {"tp": 8, "pp": 4, "dp": 8, "recompute": "selective"}
    assert op in violated(recompute_ops=(op,), **layout)["recompute_ops"].what


def test_offloaded_states_need_no_device_memory() -> None:
    assert "memory" in violated(tp=8)
    assert "memory" not in violated(tp=8, offload=("optimizer",))


@pytest.mark.parametrize("name", ["recompute_layers", "offload_layers"])
def test_a_chunk_has_only_so_many_layers(name: str) -> None:
    fields: dict[str, Any] = {"tp": 8, "pp": 4, "dp": 8, "zero": 1, "offload": ("activations",)}
    assert violated(**fields | {"recompute": "full", name: 21})[name].fix.startswith("use 20")
    assert name not in violated(**fields | {"recompute": "full", name: 20})


def test_frozen_weights_need_no_other_states() -> None:
    step: dict[str, Any] = {"tokens": 10**9, "sequence_length": 4096, "global_batch": 64}
    tuned = TrainingWorkload(adapter=LoRASpec(rank=16), **step)
    assert "memory" in violated(tp=4, workload=TrainingWorkload(**step))
    assert "memory" not in violated(tp=4, workload=tuned)
    found = violated(dp=2, workload=tuned)["memory"]
    assert "frozen" in found.what
    assert "zero=3" in found.fix


def test_uneven_key_value_heads_are_found() -> None:
    model = Model(
        name="odd",
        hidden=768,
        vocab=1000,
        pattern="2*a",
        blocks=(BlockSpec(name="a", mixer=AttentionSpec(heads=12, kv_heads=6, head_dim=64)),),
    )
    assert "key-value" in violated(model, tp=4)["tp"].what


@given(
    tp=st.integers(1, 10),
    pp=st.integers(1, 10),
    dp=st.integers(1, 10),
    ep=st.integers(1, 4),
    model=st.sampled_from([DENSE, SPARSE, LATENT]),
)
def test_every_violation_names_a_field_and_a_fix(
    tp: int, pp: int, dp: int, ep: int, model: Model
) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp * ep, ep=ep)
    for problem in layout.check(model, CLUSTER, STEP):
        assert problem.where
        assert problem.what
        assert problem.fix
