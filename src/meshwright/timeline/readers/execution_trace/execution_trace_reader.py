"""Reads execution traces: PyTorch's (JSON, schemas 1.0.1 to 1.1.1) and Chakra's (JSON, binary).

They say which operators ran, on what, and which had to wait for which; not when. So they become a
`ExecutionGraph`. Where its nodes do have times, as some of Chakra's do,
`execution_graph_to_timeline` makes a `Timeline`. `match_nodes_to_rows` finds the nodes in the trace
that PyTorch's profiler recorded of the same run.
"""

import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.execution_trace.chakra_protobuf import (
    InvalidProtobuf,
    read_messages,
    read_metadata,
    read_node,
)
from meshwright.timeline.readers.execution_trace.execution_nodes import (
    DECODE_ERRORS,
    ExecutionNode,
    parse_chakra_json_node,
    parse_chakra_node,
    parse_pytorch_node,
    split_nodes,
)
from meshwright.timeline.readers.parsing.communication_names import match_communication_rule
from meshwright.timeline.readers.parsing.compressed_file import TextChunks
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT, SpanKind, TimelineSource
from meshwright.timeline.timeline import Timeline

MAX_FILE_BYTES = 4 << 30
_CHUNK_BYTES = 1 << 22
_GROUPS = "## process_group:init ##"
_LARGEST_US = 2**50
_LEAST_NODE_BYTES = 32
_AGREED = 0.9
_RANK = re.compile(r"\.(\d{1,6})\.(?:et|json)\b")


class ExecutionGraph(NamedTuple):
    """What ran, and what depends on what."""

    path: Path
    schema: str
    metadata: Mapping[str, Any]
    """What the trace says of itself: process, times of its start and end."""
    process_groups: tuple[Mapping[str, Any], ...]
    """Process groups, as PyTorch lists them."""
    nodes: tuple[ExecutionNode, ...]
    notes: tuple[str, ...]


def read_execution_trace(path: str | Path) -> ExecutionGraph:
    """Read one trace.

    Raises `DamagedFile` where it breaks off; its `kept` is the `ExecutionGraph` of all nodes before
    that. `InputError` where it is no execution trace.
    """
    path = Path(path)
    data, packing = _read(path)
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    read = _read_json if text[:1] == b"{" else _read_binary
    try:
        graph, fault = read(path, text if read is _read_json else data)
    except InvalidProtobuf as broken:
        what = f"is no execution trace: {broken}" + (f"; {packing}" if packing else "")
        fix = "name a file of PyTorch's ExecutionTraceObserver, or a Chakra trace (.et, .json)"
        raise InputError([Problem(str(path), what, fix)]) from None
    fault = packing or fault
    if fault:
        fix = f"use the {len(graph.nodes):,} nodes before that, or record it again"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=graph)
    return graph


def execution_graph_to_timeline(graph: ExecutionGraph, *, rank: int = 0) -> Timeline:
    """The nodes that have times as a timeline; `InputError` where none has."""
    nodes = [node for node in graph.nodes if node.start_us is not None]
    if not nodes:
        what = "has no timestamps, only execution order"
        fix = "give the trace that PyTorch's profiler recorded of the same run"
        raise InputError([Problem(str(graph.path), what, fix)])
    start = np.array([min(node.start_us or 0, _LARGEST_US) for node in nodes], dtype=np.int64)
    length = np.array([min(node.duration_us or 0, _LARGEST_US) for node in nodes], dtype=np.int64)
    spans: dict[str, Any] = {
        "rank": rank,
        "process": ["host" if node.is_on_host else "gpu 0" for node in nodes],
        "lane": ["nodes" if node.is_on_host else f"stream {node.stream or 0}" for node in nodes],
        "start_ns": start * 1000,
        "duration_ns": length * 1000,
        "kind": [_kind(node).value for node in nodes],
        "name": [node.name for node in nodes],
    }
    known = [node.collective for node in nodes]
    if any(known):
        spans["collective"] = [said.name if said else None for said in known]
        spans["bytes"] = [said.num_bytes if said else ABSENT for said in known]
        spans["group"] = [said.group if said else None for said in known]
        spans["dtype"] = [said.dtype if said else None for said in known]
    left = len(graph.nodes) - len(nodes)
    notes = [*graph.notes, *([f"{left:,} nodes without times were left out"] if left else [])]
    metadata = {"profiler": "execution trace", "notes": "\n".join(notes)}
    return Timeline.from_columns(
        spans,
        source=TimelineSource.MEASURED,
        metadata={key: value for key, value in metadata.items() if value},
    )


def read_timed_execution_trace(path: str | Path) -> Timeline:
    """Read a trace whose nodes have times as a timeline; its rank is the number in `NAME.3.et`.

    `InputError` where none has; `DamagedFile` keeps the timeline of all nodes before that.
    """
    found = _RANK.search(Path(path).name)
    rank = int(found[1]) if found else 0
    try:
        return execution_graph_to_timeline(read_execution_trace(path), rank=rank)
    except DamagedFile as damage:
        if not isinstance(damage.readable, ExecutionGraph):
            raise
        raise DamagedFile(
            damage.problems, kept=execution_graph_to_timeline(damage.readable, rank=rank)
        ) from None


def match_nodes_to_rows(graph: ExecutionGraph, timeline: Timeline) -> Ints:
    """For each node the row of its span in the profiler's trace of the same run; -1 without one.

    Both count the calls of operators: `rf_id` there, `Record function id` here; traces of 2023
    and older have it as the operator's `External id`. Where fewer than nine in ten of the common
    numbers have the same name, the two are of different runs, and nothing is joined. The trace has
    to be read with `detail="shapes"`, for these are arguments of operators.
    """
    found = np.full(len(graph.nodes), ABSENT, dtype=np.int64)
    if not {"extra", "category"}.issubset(timeline.spans.column_names):
        return found
    category, name = timeline.string_column("category"), timeline.string_column("name")
    is_operator = [value in {"cpu_op", "user_annotation", "Operator"} for value in category.values]
    operators = np.flatnonzero(np.array([*is_operator, False])[category.codes])
    extra = timeline.spans.column("extra").take(operators).to_pylist()
    rows: dict[int, int] = {}
    for row, text in zip(operators.tolist(), extra, strict=True):
        try:
            said = _ARGUMENTS.decode(text or "{}")
        except DECODE_ERRORS:
            continue
        number = said.record_function or said.external
        if number > 0:
            rows.setdefault(number, row)
    common = 0
    for place, node in enumerate(graph.nodes):
        row = rows.get(node.record_function_id, ABSENT)
        common += row >= 0
        if row >= 0 and name.values[name.codes[row]] == node.name:
            found[place] = row
    agreed = int(np.count_nonzero(found >= 0))
    return found if agreed >= _AGREED * common else np.full_like(found, ABSENT)


class _Arguments(msgspec.Struct):
    record_function: int = msgspec.field(default=0, name="Record function id")
    external: int = msgspec.field(default=0, name="External id")


_ARGUMENTS = msgspec.json.Decoder(_Arguments)


def _kind(node: ExecutionNode) -> SpanKind:
    if node.is_on_host:
        return SpanKind.HOST
    if (
        node.node_type in {"send", "recv", "collective"}
        or match_communication_rule(node.name) is not None
    ):
        return SpanKind.COMMUNICATION
    return SpanKind.MEMORY_COPY if node.node_type.startswith("memory") else SpanKind.COMPUTE


def _read(path: Path) -> tuple[bytes, str]:
    source, chunks, size = TextChunks(path, _CHUNK_BYTES), [], 0
    for chunk in source:
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_FILE_BYTES:
            what = f"is larger than {MAX_FILE_BYTES:,} bytes"
            raise InputError([Problem(str(path), what, "record fewer steps")])
    return b"".join(chunks), source.error


def _most_nodes(data: bytes) -> int:
    """How many nodes a file can hold: the smallest real ones have 100 bytes."""
    return len(data) // _LEAST_NODE_BYTES + 4096


def _read_json(path: Path, text: bytes) -> tuple[ExecutionGraph, str]:
    about, items, fault = split_nodes(text)
    is_chakra = "schema" not in about
    read: Callable[[Any], ExecutionNode] = (
        parse_chakra_json_node if is_chakra else parse_pytorch_node
    )
    nodes, wrong, most = [], 0, _most_nodes(text)
    if len(items) > most:
        fault = f"it has more than {most:,} nodes, which its size cannot mean"
    for item in items[:most]:
        try:
            nodes.append(read(item))
        except DECODE_ERRORS:
            wrong += 1
    if not nodes and (wrong or is_chakra):
        raise InvalidProtobuf(fault or "it has no nodes")
    notes = (f"{wrong:,} nodes of an unknown form were left out",) if wrong else ()
    schema = "chakra json" if is_chakra else str(about["schema"])
    return ExecutionGraph(path, schema, about, _groups(nodes), tuple(nodes), notes), fault


def _read_binary(path: Path, data: bytes) -> tuple[ExecutionGraph, str]:
    found = read_messages(data)
    first = next(found, None)
    if first is None:
        raise InvalidProtobuf("it is empty")
    about = read_metadata(first)
    nodes: list[ExecutionNode] = []
    fault = ""
    try:
        most = _most_nodes(data)
        nodes.extend(parse_chakra_node(read_node(message)) for message in islice(found, most))
        if len(nodes) == most:
            fault = f"it has more than {most:,} nodes, which its size cannot mean"
    except (InvalidProtobuf, *DECODE_ERRORS) as broken:
        fault = f"it is damaged behind node {len(nodes):,}: {broken}"
    if not nodes:
        raise InvalidProtobuf(fault or "it has no nodes")
    schema = f"chakra {about.get('version') or about.get('schema') or ''}".strip()
    return ExecutionGraph(path, schema, about, _groups(nodes), tuple(nodes), ()), fault


def _groups(nodes: list[ExecutionNode]) -> tuple[Mapping[str, Any], ...]:
    for node in nodes:
        if node.name == _GROUPS and isinstance(node.inputs.values, list) and node.inputs.values:
            try:
                listed = msgspec.json.decode(node.inputs.values[0], type=list[dict[str, Any]])
            except (*DECODE_ERRORS, TypeError):
                continue
            return tuple(listed)
    return ()
