"""Execution traces of PyTorch and Chakra as graphs."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.execution_trace.chakra_protobuf import (
    InvalidProtobuf,
    read_fields,
    read_varint,
)
from meshwright.timeline.readers.execution_trace.execution_trace_reader import (
    ExecutionGraph,
    execution_graph_to_timeline,
    match_nodes_to_rows,
    read_execution_trace,
)
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.readers.trace_folder import find_traces, read_trace
from tests.timeline.readers.small_chakra import COMPUTE, REDUCE, trace

TENSOR = [5, 6, 0, 1024, 4, "cuda:0"]
OLD = {
    "schema": "1.0.1", "pid": 9, "start_ts": 3,
    "nodes": [
        {"name": "aten::mm", "id": 12, "rf_id": 4, "parent": 11, "tid": 1, "op_schema": "mm(a)",
         "inputs": [TENSOR], "input_shapes": [[32, 32]], "input_types": ["Tensor(float)"],
         "outputs": [], "output_shapes": [], "output_types": []}
    ],
}  # fmt: skip


def _new(
    name: str, number: int, values: list[Any], types: list[str], **more: Any
) -> dict[str, Any]:
    attributes = {"rf_id": number + 100, "tid": 1, **more}
    return {
        "id": number, "name": name, "ctrl_deps": number - 1,
        "inputs": {"values": values, "shapes": [[32, 32]], "types": types},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": key, "type": "x", "value": value} for key, value in attributes.items()],
    }  # fmt: skip


GROUPS = json.dumps([{"pg_name": "0", "ranks": [], "group_size": 2}])
NEW = {
    "schema": "1.1.0-chakra.0.0.4", "pid": 9, "start_ts": 3,
    "nodes": [
        _new("## process_group:init ##", 3, [GROUPS], ["String"]),
        _new("record_param_comms", 5, [[TENSOR]], ["GenericList[Tensor(float)]"],
             collective_name="allreduce", dtype="Float", in_msg_nelems=1024, out_msg_nelems=1024,
             pg_name="0", pg_size=2),
        _new("record_param_comms", 6, [[TENSOR], 12, "all_gather"],
             ["GenericList[Tensor(c10::BFloat16)]", "Int", "String"]),
    ],
}  # fmt: skip


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_the_first_schema_has_its_fields_beside_the_name(tmp_path: Path) -> None:
    (node,) = read_execution_trace(write(tmp_path / "et.json", OLD)).nodes
    assert (node.id, node.name, node.ctrl_deps, node.record_function_id) == (
        12,
        "aten::mm",
        (11,),
        4,
    )
    assert (node.inputs.shapes, node.inputs.types) == ([[32, 32]], ["Tensor(float)"])
    assert node.attributes["op_schema"] == "mm(a)"


def test_later_schemas_have_attributes_and_groups(tmp_path: Path) -> None:
    graph = read_execution_trace(write(tmp_path / "et.json", NEW))
    assert graph.schema == "1.1.0-chakra.0.0.4"
    assert graph.process_groups == ({"pg_name": "0", "ranks": [], "group_size": 2},)
    assert [node.record_function_id for node in graph.nodes] == [103, 105, 106]


def test_collectives_are_told_by_attributes_or_by_the_values_of_the_call(tmp_path: Path) -> None:
    graph = read_execution_trace(write(tmp_path / "et.json", NEW))
    first, second = (node.collective for node in graph.nodes[1:])
    assert first == ("all_reduce", 4096, "fp32", "0", 2)
    assert second == ("all_gather", 2048, "bf16", None, -1)


def test_a_graph_without_times_makes_no_timeline(tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", NEW)
    with pytest.raises(InputError, match="has no times"):
        execution_graph_to_timeline(read_execution_trace(path))
    with pytest.raises(InputError, match="has no times"):
        read_trace(path)


def test_a_trace_that_breaks_off_keeps_the_nodes_before(tmp_path: Path) -> None:
    path = tmp_path / "et.json"
    path.write_text(json.dumps(NEW)[:-60])
    with pytest.raises(DamagedFile) as caught:
        read_execution_trace(path)
    graph = cast(ExecutionGraph, caught.value.readable)
    assert [node.id for node in graph.nodes] == [3, 5]
    assert graph.schema == NEW["schema"]


def test_a_node_of_an_unknown_form_is_left_out_and_noted(tmp_path: Path) -> None:
    nodes = [*cast(list[Any], NEW["nodes"]), {"id": "seven"}]
    graph = read_execution_trace(write(tmp_path / "et.json", {**NEW, "nodes": nodes}))
    assert (len(graph.nodes), graph.notes) == (3, ("1 nodes of an unknown form were left out",))


def test_chakras_binary_form_is_read_with_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.0.et"
    path.write_bytes(trace([COMPUTE, REDUCE]))
    graph = read_execution_trace(path)
    compute, reduce = graph.nodes
    assert (graph.schema, compute.ctrl_deps, compute.data_deps) == ("chakra 0.0.4", (300, 2), (6,))
    assert (compute.record_function_id, compute.inputs.shapes) == (41, "[[2, 3]]")
    assert reduce.collective is not None
    assert reduce.collective[:2] == ("all_reduce", 4096)
    assert reduce.attributes["dims"] == [1, -1]
    timeline = execution_graph_to_timeline(graph)
    assert timeline.column("start_ns").tolist() == [1_000_000, 1_030_000]
    assert timeline.spans.column("kind").to_pylist() == ["compute", "communication"]
    assert timeline.column("bytes").tolist() == [-1, 4096]


def test_a_binary_trace_that_breaks_off_keeps_the_nodes_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.0.et"
    path.write_bytes(trace([COMPUTE, REDUCE])[:-5])
    with pytest.raises(DamagedFile, match="behind node 1") as caught:
        read_execution_trace(path)
    assert len(cast(ExecutionGraph, caught.value.readable).nodes) == 1


def test_chakras_json_form_is_read(tmp_path: Path) -> None:
    node = {"Id": 4, "Name": "c10d::broadcast_(0)", "NodeType": 7, "ctrlDeps": [3],
            "data_deps": [2], "runtime": 85, "is_cpu_op": True}  # fmt: skip
    path = write(tmp_path / "chakra.json", {"workload_graph": [node], "ngpus": 8})
    (found,) = read_execution_trace(path).nodes
    assert (found.node_type, found.ctrl_deps, found.data_deps, found.duration_us) == (
        "collective", (3,), (2,), 85,
    )  # fmt: skip
    assert found.collective is not None
    assert found.collective.name == "broadcast"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"hello", b"\x02\x08\x01", b'{"schema": 1', b"\xff" * 99]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(data)
    with pytest.raises(InputError):
        read_execution_trace(path)


def test_numbers_and_fields_that_break_off_are_refused() -> None:
    assert read_varint(b"\xac\x02", 0) == (300, 2)
    for data in (b"\x80", b"\x0a\x05ab", b"\x00\x01", b"\x0b"):
        with pytest.raises(InvalidProtobuf):
            list(read_fields(data))


def test_the_formats_are_told_apart_by_their_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(trace([COMPUTE]))
    write(tmp_path / "b", {"workload_graph": []})
    write(tmp_path / "c", NEW)
    (tmp_path / "d").write_bytes(b"\n\xa1\xf0\x08\x12\x0e/host:metadata")
    write(tmp_path / "e", {"rocprofiler-sdk-tool": []})
    found = {file.path.name: file.format for file in find_traces(tmp_path)}
    assert found == {
        "a": "chakra", "b": "chakra", "c": "execution trace", "d": "xplane", "e": "rocprofv3",
    }  # fmt: skip
    for name, what in (("d", "create_perfetto_trace"), ("e", "torch.profiler")):
        with pytest.raises(InputError, match=what):
            read_trace(tmp_path / name)


def test_nodes_are_found_in_the_profilers_trace_by_the_number_of_the_call(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": n, "dur": 1,
         "args": {"Record function id": number}}
        for n, number in enumerate([9, 4])
    ]  # fmt: skip
    timeline = read_kineto(write(tmp_path / "k.json", {"traceEvents": events}), detail="shapes")
    graph = read_execution_trace(write(tmp_path / "et.json", OLD))
    assert match_nodes_to_rows(graph, timeline).tolist() == [1]
    assert match_nodes_to_rows(graph, Timeline.empty()).tolist() == [-1]


def test_traces_of_different_runs_are_not_joined(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 0, "dur": 1,
             "args": {"External id": 4}}  # fmt: skip
    timeline = read_kineto(write(tmp_path / "k.json", {"traceEvents": [event]}), detail="shapes")
    graph = read_execution_trace(write(tmp_path / "et.json", OLD))
    assert match_nodes_to_rows(graph, timeline).tolist() == [-1]


@pytest.mark.real
def test_real_traces_of_every_schema_are_read(shared: Path, tmp_path: Path) -> None:
    folder = shared / "traces"
    nodes = {
        "param/linear_et.json.gz": 931,
        "param/resnet_et.json.gz": 14392,
        "param/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz": 14391,
        "hta/execution_trace/benchmark_simple_add_et.json.gz": 38,
    }
    for name, count in nodes.items():
        assert len(read_execution_trace(folder / name).nodes) == count
    members = {
        "chakra/feeder_tests_trace.tar.gz": ("tests/data/chakra.0.et", 3664),
        "chakra/json_trace.tar.gz": ("jsonData/chakra.0.json", 3664),
        "chakra/1.0.2-chakra.0.0.4.tgz": ("1.0.2-chakra.0.0.4.json", 263),
        "param/pt2_et.json.tar.gz": ("pt2_et.json", 20),
    }
    for name, (member, count) in members.items():
        data = gzip.decompress((folder / name).read_bytes())
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            inside = next(item for item in archive if item.name.removeprefix("./") == member)
            file = archive.extractfile(inside)
            assert file is not None
            path = tmp_path / "trace"
            path.write_bytes(file.read())
        assert len(read_execution_trace(path).nodes) == count


@pytest.mark.real
def test_a_real_pair_of_traces_is_joined(shared: Path) -> None:
    folder = shared / "traces" / "hta" / "execution_trace"
    graph = read_execution_trace(folder / "benchmark_simple_add_et.json.gz")
    timeline = read_kineto(folder / "benchmark_simple_add_trace.json.gz", detail="shapes")
    rows = match_nodes_to_rows(graph, timeline)
    name = timeline.string_column("name")
    pairs = [
        (node.name, name.values[name.codes[row]])
        for node, row in zip(graph.nodes, rows.tolist(), strict=True)
        if row >= 0
    ]
    assert len(pairs) > 20
    assert all(ours == theirs for ours, theirs in pairs)
