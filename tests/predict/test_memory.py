"""Predicted memory agrees with the published formulas and moves the way it should."""

import msgspec
import pytest

from meshwright.predict import predict_memory
from meshwright.predict.activations import bytes_per_token
from meshwright.predict.memory import in_flight
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import gpt

CLUSTER = catalog.cluster("dgx-a100-80g").with_gpus(64)
GPT = gpt("gpt-175b", layers=96, hidden=12288, heads=96, vocab=51200)


def activations(layout: Layout) -> int:
    predicted = predict_memory(GPT, layout, CLUSTER, sequence_length=2048, global_batch=64)
    return predicted.stages[0].activations_bytes


def test_a_gpt_block_keeps_the_korthikanti_bytes_without_masks() -> None:
    # 34·s·b·h of the paper less two one-byte dropout masks.
    assert bytes_per_token(Layout(), GPT.blocks[0], GPT.hidden) == 32 * GPT.hidden


def test_sequence_parallel_divides_all_of_it() -> None:
    split = Layout(tp=8, sequence_parallel=True)
    assert bytes_per_token(split, GPT.blocks[0], GPT.hidden) == 32 * GPT.hidden / 8


def test_without_sequence_parallel_the_norms_stay_whole() -> None:
    kept = bytes_per_token(Layout(tp=8), GPT.blocks[0], GPT.hidden)
    assert kept == (8 + 24 / 8) * GPT.hidden


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("gpipe", 1, (16, 16, 16, 16)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("interleaved", 2, (11, 9, 7, 5)),
        ("zb-h2", 1, (7, 5, 3, 1)),
    ],
)
def test_microbatches_in_flight_follow_the_schedule(
    schedule: str, virtual: int, expected: tuple[int, ...]
) -> None:
    layout = msgspec.convert(
        {"pp": 4, "schedule": schedule, "virtual_stages": virtual}, type=Layout
    )
    assert tuple(in_flight(layout, stage, 16) for stage in range(4)) == expected


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
    predicted = predict_memory(
        GPT, Layout(tp=8, pp=8), CLUSTER, sequence_length=2048, global_batch=64
    )
    assert [stage.logits_bytes > 0 for stage in predicted.stages] == [False] * 7 + [True]
    assert predicted.stages[-1].logits_bytes == 2048 * 6 * 51200 // 8


def test_the_worst_stage_decides_whether_it_fits() -> None:
    small = predict_memory(GPT, Layout(tp=8, pp=8), CLUSTER, sequence_length=2048, global_batch=64)
    large = predict_memory(GPT, Layout(tp=8), CLUSTER, sequence_length=2048, global_batch=64)
    assert small.fits
    assert not large.fits
    assert large.worst.total_bytes > large.capacity_bytes
