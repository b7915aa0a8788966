"""Predicted memory agrees with the published formulas and moves the way it should."""

import msgspec
import pytest

from meshwright.predict import MemoryPrediction, TrainingRun, predict_memory
from meshwright.predict.memory.activations import activation_bytes_per_token
from meshwright.predict.memory.rank_memory import count_stage_in_flight
from meshwright.predict.training_run.training_framework import EAGER, MEGATRON_2021
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_gpt
from meshwright.spec.workload import TrainingWorkload

CLUSTER = catalog.get_cluster("dgx-a100-80g").with_gpus(64)
MOE = catalog.get_model("mixtral-8x7b")
GPT = build_gpt("gpt-175b", layers=96, hidden=12288, heads=96, vocab=51200)


def predicted(layout: Layout, model: Model = GPT, length: int = 2048) -> MemoryPrediction:
    workload = TrainingWorkload(tokens=1, sequence_length=length, global_batch=64)
    return predict_memory(
        TrainingRun(JobSpec(model=model, cluster=CLUSTER, layout=layout, workload=workload))
    )


def activations(layout: Layout) -> int:
    return predicted(layout).stages[0].activations_bytes


def test_a_gpt_block_keeps_the_korthikanti_bytes_without_masks() -> None:
    # 34·s·b·h of the paper less two one-byte dropout masks.
    assert activation_bytes_per_token(Layout(), GPT.blocks[0], GPT.hidden) == 32 * GPT.hidden


def test_unfused_attention_keeps_its_scores_unless_recomputed() -> None:
    # 34·s·b·h + 5·a·s²·b of the paper, per token; recomputing the core leaves 34.
    block, hidden, old = GPT.blocks[0], GPT.hidden, MEGATRON_2021
    whole = activation_bytes_per_token(Layout(), block, hidden, software=old, length=2048)
    assert whole == 34 * hidden + 5 * 96 * 2048
    kept = activation_bytes_per_token(
        Layout(), block, hidden, ("core_attn",), software=old, length=2048
    )
    assert kept == 34 * hidden


def test_eager_software_keeps_more() -> None:
    block, hidden = catalog.get_model("llama3.1-8b").blocks[0], 4096
    assert activation_bytes_per_token(
        Layout(), block, hidden, software=EAGER
    ) > activation_bytes_per_token(Layout(), block, hidden)


def test_sequence_parallel_divides_all_of_it() -> None:
    split = Layout(tp=8, sequence_parallel=True)
    assert activation_bytes_per_token(split, GPT.blocks[0], GPT.hidden) == 32 * GPT.hidden / 8


def test_without_sequence_parallel_the_norms_stay_whole() -> None:
    kept = activation_bytes_per_token(Layout(tp=8), GPT.blocks[0], GPT.hidden)
    assert kept == (8 + 24 / 8) * GPT.hidden


def test_routed_tokens_are_spread_over_all_ranks_of_a_stage() -> None:
    # Tokens are conserved: eight ranks hold together what one rank would.
    block = MOE.blocks[0]
    alone = activation_bytes_per_token(Layout(), block, MOE.hidden)
    spread = Layout(tp=8, ep=8, expert_tp=1, sequence_parallel=True)
    assert 8 * activation_bytes_per_token(spread, block, MOE.hidden) == pytest.approx(alone)
    cut = Layout(tp=8, sequence_parallel=True)
    routed = 2 * MOE.hidden * 2  # each of the eight ranks of an expert sees all its tokens
    kept = activation_bytes_per_token(cut, block, MOE.hidden)
    assert 8 * kept == pytest.approx(alone + 7 * routed)


def test_key_value_heads_that_run_out_are_kept_by_every_rank() -> None:
    block = catalog.get_model("gemma-2b").blocks[0]
    hidden = catalog.get_model("gemma-2b").hidden
    whole = activation_bytes_per_token(Layout(), block, hidden)
    cut = activation_bytes_per_token(Layout(tp=8, sequence_parallel=True), block, hidden)
    assert cut == pytest.approx((whole - 4 * 256) / 8 + 4 * 256)


def test_multi_token_heads_weigh_on_the_last_stage() -> None:
    model = catalog.get_model("deepseek-v3")
    layout = Layout(pp=2, dp=64, ep=64, zero=1, stage_layers=(30, 31))
    plain = msgspec.structs.replace(model, multi_token=None)
    sizes = [predicted(layout, m, length=4096).stages[1] for m in (model, plain)]
    assert sizes[0].parameters_bytes > sizes[1].parameters_bytes
    assert sizes[0].activations_bytes > sizes[1].activations_bytes


def test_offloaded_activations_leave_the_device() -> None:
    base = Layout(tp=8, pp=8)
    off = msgspec.structs.replace(base, offload=("activations",))
    assert activations(off) < activations(base) / 4


def test_only_the_activations_of_offloaded_layers_leave_the_device() -> None:
    base = Layout(tp=8, pp=8)  # 12 layers a stage
    sizes = [
        activations(msgspec.structs.replace(base, offload=("activations",), offload_layers=layers))
        for layers in range(13)
    ]
    whole = activations(base)
    assert sizes == pytest.approx([whole * (1 - layers / 12) for layers in range(13)], abs=1)


def test_what_is_offloaded_needs_room_for_at_most_two_layers_on_its_way() -> None:
    base = Layout(tp=8, pp=8)
    work = [
        predicted(
            msgspec.structs.replace(base, offload=("activations",), offload_layers=layers)
        ).stages[0].working_bytes
        for layers in (0, 1, 2, 3)
    ]  # fmt: skip
    assert work[0] == predicted(base).stages[0].working_bytes
    assert work[1] - work[0] == work[2] - work[1] > 0
    assert work[3] == work[2]


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("gpipe", 1, (16, 16, 16, 16)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("interleaved", 2, (11, 9, 7, 5)),
        ("zb-h1", 1, (4, 4, 4, 4)),
        ("zb-h2", 1, (7, 7, 7, 7)),
    ],
)
def test_microbatches_in_flight_follow_the_schedule(
    schedule: str, virtual: int, expected: tuple[int, ...]
) -> None:
    layout = msgspec.convert(
        {"pp": 4, "schedule": schedule, "virtual_stages": virtual}, type=Layout
    )
    assert tuple(count_stage_in_flight(layout, stage, 16) for stage in range(4)) == expected


def test_recompute_keeps_less_the_more_it_covers() -> None:
    base = Layout(tp=8, pp=8)
    selective = msgspec.structs.replace(base, recompute="selective", recompute_ops=("mlp",))
    half = msgspec.structs.replace(base, recompute="full", recompute_layers=6)
    full = msgspec.structs.replace(base, recompute="full")
    sizes = [activations(layout) for layout in (base, selective, half, full)]
    assert sizes[0] > sizes[1] > sizes[3]
    assert sizes[0] > sizes[2] > sizes[3]


def test_context_parallel_halves_the_tokens_of_a_rank() -> None:
    assert activations(Layout(tp=8, pp=4, cp=2)) == pytest.approx(
        activations(Layout(tp=8, pp=4)) / 2, rel=1e-6
    )


def test_the_head_rank_carries_the_logits() -> None:
    stages = predicted(Layout(tp=8, pp=8)).stages
    assert [stage.logits_bytes > 0 for stage in stages] == [False] * 7 + [True]
    assert stages[-1].logits_bytes == 2048 * 6 * 51200 // 8


def test_the_worst_stage_decides_whether_it_fits() -> None:
    fitting, failing = predicted(Layout(tp=8, pp=8)), predicted(Layout(tp=8))
    assert fitting.fits
    assert fitting.free_bytes == fitting.capacity_bytes - fitting.worst_stage.total_bytes
    assert not failing.fits
    assert failing.free_bytes < 0


def test_the_parts_of_a_stage_add_up() -> None:
    for stage in predicted(Layout(tp=8, pp=8)).stages:
        states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
        rest = stage.activations_bytes + stage.logits_bytes + stage.framework_bytes
        assert stage.total_bytes == states + rest


def test_each_reading_holds_the_one_before() -> None:
    stage = predicted(Layout(tp=8, pp=8)).worst_stage
    assert stage.counted_bytes < stage.allocated_bytes < stage.reserved_bytes < stage.total_bytes
