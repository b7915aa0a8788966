"""What a plan of weights costs follows its bytes, its links and who sends."""

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.policy.resharding.weight_transfer import RankShards, plan_weight_transfer
from meshwright.predict.rl.weight_transfer_time import predict_weight_transfer
from meshwright.spec import catalog

ROWS, WIDTH = 65536, 8192
CLUSTER = catalog.get_cluster("h100-superpod").with_gpus(16)


def rows(part: int, of: int, *formats: str) -> dict[str, RankShards]:
    size = ROWS // of
    box = TensorBox((part * size, 0), (size, WIDTH))
    return {"w": RankShards(formats or ("bf16",), (ROWS, WIDTH), (box,))}


WHOLE = rows(0, 1)
BYTES = 2 * ROWS * WIDTH


def test_one_message_takes_its_bytes_over_its_link() -> None:
    plan = plan_weight_transfer([WHOLE], [WHOLE])
    inside = predict_weight_transfer(plan, CLUSTER)
    least = BYTES / CLUSTER.bandwidth_between(0, 1)
    packing = 10 * BYTES / CLUSTER.gpu.memory_bytes_per_s
    assert least < inside.send_s < 1.5 * least + packing
    assert inside.moved_bytes == inside.staging_bytes == BYTES
    far = predict_weight_transfer(
        plan_weight_transfer([WHOLE], [WHOLE], target_seats=(8,)), CLUSTER
    )
    assert far.send_s > 3 * inside.send_s
    assert far.apply_s == inside.apply_s


def test_as_many_senders_as_engines_take_as_long_as_one_pair() -> None:
    pair = predict_weight_transfer(plan_weight_transfer([WHOLE], [WHOLE]), CLUSTER)
    alone = predict_weight_transfer(plan_weight_transfer([WHOLE], [WHOLE] * 4), CLUSTER)
    four = predict_weight_transfer(plan_weight_transfer([WHOLE] * 4, [WHOLE] * 4), CLUSTER)
    assert four.send_s == pytest.approx(pair.send_s)
    assert four.mean_send_s == pytest.approx(four.send_s)
    assert 3.9 * pair.send_s < alone.send_s < 4.1 * pair.send_s
    assert alone.busiest_gpu == 0


def test_a_broadcast_spares_a_source_that_is_alone() -> None:
    direct = predict_weight_transfer(plan_weight_transfer([WHOLE], [WHOLE] * 4), CLUSTER)
    shared = predict_weight_transfer(
        plan_weight_transfer([WHOLE], [WHOLE] * 4, fan="broadcast"), CLUSTER
    )
    assert shared.send_s < direct.send_s / 2
    assert shared.moved_bytes == direct.moved_bytes == 4 * BYTES


def test_what_stays_takes_memory_alone() -> None:
    plan = plan_weight_transfer([WHOLE], [WHOLE], target_seats=(0,))
    here = predict_weight_transfer(plan, CLUSTER)
    assert here.moved_bytes == 0
    passes = 30
    assert 0 < here.seconds < passes * BYTES / CLUSTER.gpu.memory_bytes_per_s


def test_fewer_bits_take_less_time() -> None:
    sources = [rows(part, 2, "fp32") for part in range(2)]
    narrow, wide = (
        predict_weight_transfer(
            plan_weight_transfer(sources, [rows(0, 1, *formats)], target_seats=(8,)), CLUSTER
        )
        for formats in (("bf16", "fp8-rows"), ("bf16",))
    )
    assert narrow.moved_bytes == BYTES // 2 + 4 * ROWS
    assert narrow.send_s < 0.6 * wide.send_s


def test_the_guide_runs() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "guide" / "posttrain-weights.md"
    block, *_ = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["plan"].sent_bytes() == [33_554_432] * 4
    assert names["plan"].slices[0].formats == ("fp32", "bf16")
    assert names["cost"].moved_bytes == 4 * 33_554_432


def test_a_cluster_that_is_too_small_is_named() -> None:
    plan = plan_weight_transfer([WHOLE] * 16, [WHOLE] * 4)
    with pytest.raises(InputError, match=r"16 GPUs, the plan needs 20 .*with_gpus\(20\)"):
        predict_weight_transfer(plan, CLUSTER)
