"""Reads execution traces: PyTorch's (JSON, schemas 1.0.1 to 1.1.1) and Chakra's (JSON, binary).

They say which operators ran, on what, and which had to wait for which; not when. So they become a
`Graph`. Where its nodes do have times, as some of Chakra's do, `timeline_of` makes a `Timeline`.
`rows_of_nodes` finds the nodes in the trace that PyTorch's profiler recorded of the same run.
"""

import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.chakra_wire import Broken, messages, read_metadata, read_node
from meshwright.timeline.readers.communication import rule_of
from meshwright.timeline.readers.execution_nodes import (
    FAULTS,
    Node,
    chakra_json_node,
    chakra_node,
    node_texts,
    pytorch_node,
)
from meshwright.timeline.readers.kineto_source import Source as Bytes
from meshwright.timeline.readers.kineto_times import Ints
from meshwright.timeline.schema import ABSENT, Kind, Source
from meshwright.timeline.timeline import Timeline

LIMIT_BYTES = 4 << 30
_CHUNK_BYTES = 1 << 22
_GROUPS = "## process_group:init ##"
_LARGEST_US = 2**50
_LEAST_NODE_BYTES = 32
_AGREED = 0.9
_RANK = re.compile(r"\.(\d{1,6})\.(?:et|json)\b")


class Graph(NamedTuple):
    """What ran, and what depends on what."""

    path: Path
    schema: str
    about: Mapping[str, Any]
    """What the trace says of itself: process, times of its start and end."""
    groups: tuple[Mapping[str, Any], ...]
    """Process groups, as PyTorch lists them."""
    nodes: tuple[Node, ...]
    notes: tuple[str, ...]


def read_execution_trace(path: str | Path) -> Graph:
    """Read one trace.

    Raises `DamagedFile` where it breaks off; its `kept` is the `Graph` of all nodes before that.
    `InputError` where it is no execution trace.
    """
    path = Path(path)
    data, packing = _read(path)
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    read = _read_json if text[:1] == b"{" else _read_binary
    try:
        graph, fault = read(path, text if read is _read_json else data)
    except Broken as broken:
        what = f"is no execution trace: {broken}" + (f"; {packing}" if packing else "")
        fix = "name a file of PyTorch's ExecutionTraceObserver, or a Chakra trace (.et, .json)"
        raise InputError([Problem(str(path), what, fix)]) from None
    fault = packing or fault
    if fault:
        fix = f"use the {len(graph.nodes):,} nodes before that, or record it again"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=graph)
    return graph


def timeline_of(graph: Graph, *, rank: int = 0) -> Timeline:
    """The nodes that have times as a timeline; `InputError` where none has."""
    nodes = [node for node in graph.nodes if node.start_us is not None]
    if not nodes:
        what = "has no times: it says what ran in which order, not when"
        fix = "give the trace that PyTorch's profiler recorded of the same run"
        raise InputError([Problem(str(graph.path), what, fix)])
    start = np.array([min(node.start_us or 0, _LARGEST_US) for node in nodes], dtype=np.int64)
    length = np.array([min(node.duration_us or 0, _LARGEST_US) for node in nodes], dtype=np.int64)
    spans: dict[str, Any] = {
        "rank": rank,
        "process": ["host" if node.on_host else "gpu 0" for node in nodes],
        "lane": ["nodes" if node.on_host else f"stream {node.stream or 0}" for node in nodes],
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
        source=Source.MEASURED,
        metadata={key: value for key, value in metadata.items() if value},
    )


def read_timed(path: str | Path) -> Timeline:
    """Read a trace whose nodes have times as a timeline; its rank is the number in `NAME.3.et`.

    `InputError` where none has; `DamagedFile` keeps the timeline of all nodes before that.
    """
    found = _RANK.search(Path(path).name)
    rank = int(found[1]) if found else 0
    try:
        return timeline_of(read_execution_trace(path), rank=rank)
    except DamagedFile as damage:
        if not isinstance(damage.kept, Graph):
            raise
        raise DamagedFile(damage.problems, kept=timeline_of(damage.kept, rank=rank)) from None


def rows_of_nodes(graph: Graph, timeline: Timeline) -> Ints:
    """For each node the row of its span in the profiler's trace of the same run; -1 without one.

    Both count the calls of operators: `rf_id` there, `Record function id` here; traces of 2023
    and older have it as the operator's `External id`. Where fewer than nine in ten of the common
    numbers have the same name, the two are of different runs, and nothing is joined. The trace has
    to be read with `detail="shapes"`, for these are arguments of operators.
    """
    found = np.full(len(graph.nodes), ABSENT, dtype=np.int64)
    if not {"extra", "category"}.issubset(timeline.spans.column_names):
        return found
    category, name = timeline.strings("category"), timeline.strings("name")
    is_operator = [value in {"cpu_op", "user_annotation", "Operator"} for value in category.values]
    operators = np.flatnonzero(np.array([*is_operator, False])[category.codes])
    extra = timeline.spans.column("extra").take(operators).to_pylist()
    rows: dict[int, int] = {}
    for row, text in zip(operators.tolist(), extra, strict=True):
        try:
            said = _ARGUMENTS.decode(text or "{}")
        except FAULTS:
            continue
        number = said.record_function or said.external
        if number > 0:
            rows.setdefault(number, row)
    common = 0
    for place, node in enumerate(graph.nodes):
        row = rows.get(node.record_function, ABSENT)
        common += row >= 0
        if row >= 0 and name.values[name.codes[row]] == node.name:
            found[place] = row
    agreed = int(np.count_nonzero(found >= 0))
    return found if agreed >= _AGREED * common else np.full_like(found, ABSENT)


class _Arguments(msgspec.Struct):
    record_function: int = msgspec.field(default=0, name="Record function id")
    external: int = msgspec.field(default=0, name="External id")


_ARGUMENTS = msgspec.json.Decoder(_Arguments)


def _kind(node: Node) -> Kind:
    if node.on_host:
        return Kind.HOST
    if node.kind in {"send", "recv", "collective"} or rule_of(node.name) is not None:
        return Kind.COMMUNICATION
    return Kind.MEMORY_COPY if node.kind.startswith("memory") else Kind.COMPUTE


def _read(path: Path) -> tuple[bytes, str]:
    source, chunks, size = Bytes(path, _CHUNK_BYTES), [], 0
    for chunk in source:
        chunks.append(chunk)
        size += len(chunk)
        if size > LIMIT_BYTES:
            what = f"is larger than {LIMIT_BYTES:,} bytes"
            raise InputError([Problem(str(path), what, "record fewer steps")])
    return b"".join(chunks), source.fault


def _most_nodes(data: bytes) -> int:
    """How many nodes a file can hold: the smallest real ones have 100 bytes."""
    return len(data) // _LEAST_NODE_BYTES + 4096


def _read_json(path: Path, text: bytes) -> tuple[Graph, str]:
    about, items, fault = node_texts(text)
    is_chakra = "schema" not in about
    read: Callable[[Any], Node] = chakra_json_node if is_chakra else pytorch_node
    nodes, wrong, most = [], 0, _most_nodes(text)
    if len(items) > most:
        fault = f"it has more than {most:,} nodes, which its size cannot mean"
    for item in items[:most]:
        try:
            nodes.append(read(item))
        except FAULTS:
            wrong += 1
    if not nodes and (wrong or is_chakra):
        raise Broken(fault or "it has no nodes")
    notes = (f"{wrong:,} nodes of an unknown form were left out",) if wrong else ()
    schema = "chakra json" if is_chakra else str(about["schema"])
    return Graph(path, schema, about, _groups(nodes), tuple(nodes), notes), fault


def _read_binary(path: Path, data: bytes) -> tuple[Graph, str]:
    found = messages(data)
    first = next(found, None)
    if first is None:
        raise Broken("it is empty")
    about = read_metadata(first)
    nodes: list[Node] = []
    fault = ""
    try:
        most = _most_nodes(data)
        nodes.extend(chakra_node(read_node(message)) for message in islice(found, most))
        if len(nodes) == most:
            fault = f"it has more than {most:,} nodes, which its size cannot mean"
    except (Broken, *FAULTS) as broken:
        fault = f"it is damaged behind node {len(nodes):,}: {broken}"
    if not nodes:
        raise Broken(fault or "it has no nodes")
    schema = f"chakra {about.get('version') or about.get('schema') or ''}".strip()
    return Graph(path, schema, about, _groups(nodes), tuple(nodes), ()), fault


def _groups(nodes: list[Node]) -> tuple[Mapping[str, Any], ...]:
    for node in nodes:
        if node.name == _GROUPS and isinstance(node.inputs.values, list) and node.inputs.values:
            try:
                listed = msgspec.json.decode(node.inputs.values[0], type=list[dict[str, Any]])
            except (*FAULTS, TypeError):
                continue
            return tuple(listed)
    return ()
