"""The nodes of execution traces: one form for the forms that PyTorch and Chakra wrote over time."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.timeline.readers.execution_trace.chakra_protobuf import COLLECTIVES, NODE_TYPES
from meshwright.timeline.readers.parsing.communication_names import (
    dtype_bytes,
    normalize_collective,
    normalize_dtype,
)
from meshwright.timeline.readers.parsing.event_categories import COLLECTIVE_OPERATOR
from meshwright.timeline.schema import ABSENT

DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)
_LARGEST = 2**63 - 1
_HEADS = re.compile(rb'"(?:nodes|workload_graph)"\s*:\s*\[')
_SPACE = re.compile(r"[\s,]*")


class NodeTensors(NamedTuple):
    """What a node takes or gives."""

    values: Any = ()
    """A list; as text where the trace has it as text."""
    shapes: Any = ()
    types: Any = ()


class NodeCollective(NamedTuple):
    """What a node that communicates says."""

    name: str
    num_bytes: int
    """Of the larger of input and output; -1 where it does not say."""
    dtype: str | None
    group: str | None
    group_size: int


class ExecutionNode(NamedTuple):
    """One call of an operator, or one kernel."""

    id: int
    name: str
    node_type: str
    """Chakra's: compute, collective, send, recv, memory load, memory store, metadata."""
    ctrl_deps: tuple[int, ...]
    """Nodes that it was called from, or that must have begun before: control dependencies."""
    data_deps: tuple[int, ...]
    """Nodes whose results it takes, where the trace says that."""
    start_us: int | None
    duration_us: int | None
    is_on_host: bool
    stream: int | None
    record_function_id: int
    """The number of the call, as PyTorch's profiler counts them; -1 where there is none."""
    tid: int
    inputs: NodeTensors
    outputs: NodeTensors
    collective: NodeCollective | None
    attributes: Mapping[str, Any]


class _Parts(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _PyTorchNode(msgspec.Struct):
    id: int
    name: str = ""
    ctrl_deps: int | list[int] | None = None
    parent: int | None = None
    inputs: _Parts | list[Any] = []
    input_shapes: list[Any] = []
    input_types: list[Any] = []
    outputs: _Parts | list[Any] = []
    output_shapes: list[Any] = []
    output_types: list[Any] = []
    attrs: list[_Attribute] = []
    rf_id: int = ABSENT
    fw_parent: int = 0
    seq_id: int = -1
    scope: int = 0
    tid: int = 0
    fw_tid: int = 0
    op_schema: str = ""


class _ChakraNode(msgspec.Struct):
    Id: int
    Name: str = ""
    NodeType: int = 0
    ctrl_deps: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    data_deps: list[int] = []
    runtime: float | None = None
    is_cpu_op: bool = True
    comm_type: int | None = None
    comm_size: int | None = None
    comm_group: str | None = None


_PYTORCH = msgspec.json.Decoder(_PyTorchNode)
_CHAKRA = msgspec.json.Decoder(_ChakraNode)


def split_nodes(text: bytes) -> tuple[dict[str, Any], list[Any], str]:
    """What a file says beside its nodes, the nodes as texts, and where it breaks off."""
    fault = ""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = "nodes" if "nodes" in fields else "workload_graph"
        items: list[Any] = msgspec.json.decode(fields.pop(name, b"[]"), type=list[msgspec.Raw])
        about = {key: _plain(value) for key, value in fields.items()}
    except DECODE_ERRORS as error:
        fault = f"truncated or invalid JSON: {error}"
        about, items = _before_the_fault(text)
    return about, items, fault


def _plain(text: Any) -> Any:
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS:
        return None


def _before_the_fault(text: bytes) -> tuple[dict[str, Any], list[Any]]:
    """The nodes of a file that breaks off, one by one."""
    found = _HEADS.search(text)
    if found is None:
        return {}, []
    head = text[: found.start()].rstrip().rstrip(b",") + b"}"
    said = _plain(head)
    about = said if isinstance(said, dict) else {}
    if b'"nodes"' in found[0]:
        about.setdefault("schema", "unknown")
    rest = text[found.end() :].decode(errors="replace")
    items: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while True:
        space = _SPACE.match(rest, at)
        at = space.end() if space else at
        try:
            _, end = decoder.raw_decode(rest, at)
        except (ValueError, RecursionError):
            return about, items
        items.append(rest[at:end].encode())
        at = end


def parse_pytorch_node(text: Any) -> ExecutionNode:
    """A node of PyTorch's, of any schema."""
    given = _PYTORCH.decode(text)
    attributes = {item.name: item.value for item in given.attrs}
    for name in ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema"):
        attributes.setdefault(name, getattr(given, name))
    inputs = _values(given.inputs, given.input_shapes, given.input_types)
    outputs = _values(given.outputs, given.output_shapes, given.output_types)
    deps = given.ctrl_deps if given.ctrl_deps is not None else given.parent
    collective = None
    if given.name == COLLECTIVE_OPERATOR:
        collective = _collective(attributes, inputs, outputs)
    return ExecutionNode(
        given.id,
        given.name,
        "collective" if collective else "compute",
        tuple(deps) if isinstance(deps, list) else () if deps is None else (deps,),
        (),
        None,
        None,
        True,
        None,
        _integer(attributes["rf_id"]),
        _integer(attributes["tid"]),
        inputs,
        outputs,
        collective,
        attributes,
    )


def parse_chakra_node(given: Mapping[str, Any]) -> ExecutionNode:
    """A node of Chakra's, of its binary form."""
    attributes = given["attr"]
    parts = [given.get(name, {}) for name in ("inputs", "outputs")]
    inputs, outputs = (
        NodeTensors(said.get(1, ""), said.get(2, ""), said.get(3, "")) for said in parts
    )
    on_host = attributes.get("is_cpu_op", True)
    return ExecutionNode(
        _integer(given.get("id", 0)),
        given.get("name", ""),
        given.get("type", "invalid"),
        tuple(given["ctrl_deps"]),
        tuple(given["data_deps"]),
        given.get("start_us"),
        given.get("duration_us"),
        bool(on_host) if isinstance(on_host, int) else True,
        attributes.get("stream") if isinstance(attributes.get("stream"), int) else None,
        _integer(attributes.get("rf_id")),
        _integer(attributes.get("tid")),
        inputs,
        outputs,
        _chakra_collective(given.get("type", ""), given.get("name", ""), attributes),
        attributes,
    )


def parse_chakra_json_node(text: Any) -> ExecutionNode:
    """A node of Chakra's, of its JSON form."""
    given = _CHAKRA.decode(text)
    said = {"comm_type": given.comm_type, "comm_size": given.comm_size, "pg_name": given.comm_group}
    kind = NODE_TYPES.get(given.NodeType, "invalid")
    runtime = given.runtime if given.runtime is not None and 0 <= given.runtime < 2**50 else None
    return ExecutionNode(
        given.Id,
        given.Name,
        kind,
        tuple(given.ctrl_deps),
        tuple(given.data_deps),
        None,
        None if runtime is None else round(runtime),
        given.is_cpu_op,
        None,
        ABSENT,
        ABSENT,
        NodeTensors(),
        NodeTensors(),
        _chakra_collective(kind, given.Name, said),
        {},
    )


def _values(given: _Parts | list[Any], shapes: list[Any], types: list[Any]) -> NodeTensors:
    if isinstance(given, _Parts):
        return NodeTensors(given.values, given.shapes, given.types)
    return NodeTensors(given, shapes, types)


def _integer(value: Any) -> int:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
    return value if fits else ABSENT


def _collective(
    attributes: Mapping[str, Any], inputs: NodeTensors, outputs: NodeTensors
) -> NodeCollective | None:
    name = attributes.get("collective_name")
    if not isinstance(name, str):
        # Older traces say it only among the values that the call was given.
        words = [value for value in inputs.values if isinstance(value, str)]
        name = next((word for word in words if normalize_collective(word)), None)
    ours = normalize_collective(name) if name else None
    if ours is None:
        return None
    said = attributes.get("dtype")
    if not isinstance(said, str):
        match = re.search(r"Tensor\((?:c10::)?(\w+)\)", json.dumps(inputs.types))
        said = match[1] if match else None
    dtype = normalize_dtype(said) if said else None
    counts = [_integer(attributes.get(key)) for key in ("in_msg_nelems", "out_msg_nelems")]
    if max(counts) < 0:
        counts = [sum(_elements(part.values)) for part in (inputs, outputs)]
    size = dtype_bytes(dtype) if dtype else None
    num_bytes = max(counts) * size if size and 0 < max(counts) < 2**56 else ABSENT
    group = attributes.get("pg_name")
    return NodeCollective(
        ours,
        num_bytes,
        dtype,
        group if isinstance(group, str) else None,
        _integer(attributes.get("pg_size")),
    )


def _elements(values: Any, depth: int = 0) -> Iterable[int]:
    """The sizes of the tensors among values: [tensor, storage, offset, elements, size, device]."""
    if not isinstance(values, list) or depth > 4:
        return
    if len(values) == 6 and isinstance(values[5], str) and isinstance(values[3], int):
        yield values[3]
        return
    for value in values:
        yield from _elements(value, depth + 1)


def _chakra_collective(kind: str, name: str, said: Mapping[str, Any]) -> NodeCollective | None:
    if kind not in {"collective", "send", "recv"}:
        return None
    number = said.get("comm_type")
    ours: str | None = kind
    if kind == "collective":
        known = isinstance(number, int) and 0 <= number < len(COLLECTIVES)
        ours = COLLECTIVES[number or 0] if known else normalize_collective(name)
    if ours is None:
        return None
    group = said.get("pg_name") or said.get("comm_group")
    group = group if isinstance(group, str) else None
    return NodeCollective(ours, _integer(said.get("comm_size")), None, group, ABSENT)
