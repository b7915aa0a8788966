"""What execution traces say ran."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.analyze.compute_efficiency.operator_counts import (
    ExecutionTraceCounts,
    count_operators,
)
from meshwright.timeline.readers.execution_trace.execution_trace_reader import read_execution_trace
from tests.timeline.readers.execution_trace.test_execution_trace_reader import NEW


def _node(number: int, name: str, parent: int, shapes: list[Any], **more: Any) -> dict[str, Any]:
    types = ["Tensor(c10::BFloat16)" if shape else "Int" for shape in shapes]
    values = more.pop("values", [[1, 2, 0, 8, 2, "cuda:0"] if shape else 1 for shape in shapes])
    return {
        "id": number, "name": name, "ctrl_deps": parent,
        "inputs": {"values": values, "shapes": shapes, "types": types},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": "rf_id", "type": "uint64", "value": number}],
    }  # fmt: skip


def _count(path: Path, *nodes: dict[str, Any]) -> ExecutionTraceCounts:
    path.write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": list(nodes)}))
    return count_operators([read_execution_trace(path)])


def test_operators_are_counted_with_their_shapes(tmp_path: Path) -> None:
    nodes = [_node(n, "aten::add", 1, [[4, 4], [4, 4]]) for n in (3, 4)]
    found = _count(
        tmp_path / "et", *nodes, _node(5, "aten::add", 1, [[2]]), _node(6, "step", 1, [])
    )
    (add,) = found.operators
    assert (add.name, add.calls) == ("aten::add", 3)
    assert add.shapes == (("[4, 4] [4, 4]", 2), ("[2]", 1))
    assert not found.has_durations


def test_a_product_inside_a_product_counts_once(tmp_path: Path) -> None:
    outer = _node(3, "aten::linear", 1, [[8, 16], [32, 16], []])
    inner = _node(4, "aten::addmm", 3, [[32], [8, 16], [16, 32]])
    alone = _node(5, "aten::mm", 1, [[8, 16], [16, 32]])
    found = _count(tmp_path / "et", outer, inner, alone)
    assert {one.name: one.calls for one in found.gemms} == {"aten::linear": 1, "aten::mm": 1}
    assert found.flops == 2 * (2 * 8 * 16 * 32)
    assert {one.dtype for one in found.gemms} == {"bf16"}


def test_products_that_say_too_little_are_told(tmp_path: Path) -> None:
    found = _count(tmp_path / "et", _node(3, "aten::mm", 1, [[8, 16]]))
    assert found.gemms == ()
    assert found.uncounted_gemms == {"aten::mm": 1}


def test_collectives_have_kind_group_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "et"
    path.write_text(json.dumps(NEW))
    graph = read_execution_trace(path)
    found = {one.collective: one for one in count_operators([graph, graph]).collectives}
    reduce = found["all_reduce"]
    assert (reduce.group, reduce.group_size, reduce.dtype) == ("0", 2, "fp32")
    assert (reduce.calls, reduce.bytes) == (2, 2 * 4096)


@pytest.mark.real
def test_three_steps_of_a_real_job_have_three_times_one_steps_flops(
    shared: Path, tmp_path: Path
) -> None:
    """The same network recorded twice by different tools: PyTorch's trace and Chakra's pieces."""
    traces = shared / "traces"
    whole = traces / "param" / "1.1.0-chakra.0.0.4" / "resnet_2gpu_et.json.gz"
    archive = traces / "chakra" / "feeder_tests_trace.tar.gz"
    if not whole.exists() or not archive.exists():
        pytest.skip("shared/traces is not there")
    with tarfile.open(archive) as packed:
        packed.extract("tests/data/chakra.0.et", tmp_path, filter="data")
    three = count_operators([read_execution_trace(whole)])
    one = count_operators([read_execution_trace(tmp_path / "tests/data/chakra.0.et")])
    assert three.flops == pytest.approx(3 * one.flops, rel=1e-9)
    # ResNet-50 takes 4.09 G multiplications of an image forward, and twice that backward, less
    # the gradient of the image.
    assert one.flops / 32 == pytest.approx(3 * 2 * 4.09e9, rel=0.02)
    assert sum(c.bytes for c in three.collectives if c.collective == "all_reduce") == 3 * sum(
        c.bytes for c in one.collectives if c.collective == "all_reduce"
    )
