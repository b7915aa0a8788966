"""What execution traces say ran: operators with their shapes, products, collectives; not when.

Chakra cuts an operator into pieces, `aten::mm(0)` and `aten::mm(1)`, around the kernels it starts:
they are one call. Of products that call each other, only the outermost whose shapes tell its FLOPs
counts. Where nodes have durations, those are of nodes one inside another and need not add up.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from meshwright.observe.analyze.compute_efficiency.flop_formulas import FLOP_FORMULAS
from meshwright.observe.analyze.compute_efficiency.operator_flops import (
    CountedCall,
    count_call_flops,
)
from meshwright.timeline.readers.execution_trace.execution_nodes import (
    ExecutionNode,
    NodeCollective,
)
from meshwright.timeline.readers.execution_trace.execution_trace_reader import ExecutionGraph

_PIECE = re.compile(r"(.+)\((\d{1,6})\)")
_TENSOR = re.compile(r"Tensor\((.+)\)")
_PRODUCTS = dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), "aten::convolution")
"""Calls whose first arguments are those of a product with a rule, where only they are there."""
_WRAPPER = "autograd::engine::evaluate_function"
_FAULTS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class OperatorCount(NamedTuple):
    """Calls of one operator, or runs of one kernel."""

    name: str
    on_host: bool
    calls: int
    shapes: tuple[tuple[str, int], ...]
    """Of its inputs, with how many calls had them, the most frequent first."""
    duration_us: int | None
    """Of all its nodes; None where the trace has no durations."""


class GemmCount(NamedTuple):
    """Products of one operator, element type and shapes."""

    name: str
    dtype: str
    shape: str
    calls: int
    flops: float
    """Of all calls."""


class CollectiveCount(NamedTuple):
    """Collectives of one kind, group and element type."""

    collective: str
    group: str
    group_size: int
    """-1 where it is not known."""
    dtype: str
    calls: int
    bytes: int
    """Of all calls that say it."""
    num_unsized_calls: int
    """Calls that do not say their bytes."""


class ExecutionTraceCounts(NamedTuple):
    """What ran in all traces together."""

    schemas: tuple[str, ...]
    num_traces: int
    num_nodes: int
    operators: tuple[OperatorCount, ...]
    """Those with most calls first."""
    gemms: tuple[GemmCount, ...]
    """Those with most FLOPs first."""
    uncounted_gemms: Mapping[str, int]
    """Calls of products whose arguments do not tell their FLOPs."""
    assumptions: tuple[str, ...]
    collectives: tuple[CollectiveCount, ...]
    has_durations: bool
    notes: tuple[str, ...]

    @property
    def flops(self) -> float:
        """Of all products."""
        return sum(one.flops for one in self.gemms)


def count_operators(graphs: Sequence[ExecutionGraph]) -> ExecutionTraceCounts:
    """Sum up execution traces: one, or those of several ranks."""
    calls: Counter[tuple[str, bool]] = Counter()
    shapes: defaultdict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
    lengths: defaultdict[tuple[str, bool], int] = defaultdict(int)
    sums: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    uncounted: Counter[str] = Counter()
    assumed: dict[str, None] = {}
    spoken: defaultdict[tuple[str, str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for graph in graphs:
        for node in graph.nodes:
            name, piece = _whole_name(node)
            if node.is_on_host and ("::" not in name or name.startswith(_WRAPPER)):
                continue
            key = (name, node.is_on_host)
            lengths[key] += node.duration_us or 0
            if piece == 0:
                calls[key] += 1
                shapes[key][_shape_text(node)] += 1
        found, missing = _products(graph)
        uncounted.update(missing)
        for name, counted in found:
            row = sums[name, counted[1], counted[2]]
            row[0] += 1
            row[1] += counted[0]
            assumed |= dict.fromkeys(text for text in (counted[4],) if text)
        for said in _collectives(graph.nodes):
            number = spoken[_key(graph, said)]
            number[0] += 1
            number[1] += max(said.num_bytes, 0)
            number[2] += said.num_bytes < 0
    timed = any(node.duration_us is not None for graph in graphs for node in graph.nodes)
    return ExecutionTraceCounts(
        tuple(dict.fromkeys(graph.schema for graph in graphs)),
        len(graphs),
        sum(len(graph.nodes) for graph in graphs),
        tuple(
            OperatorCount(
                *key,
                number,
                tuple((text, count) for text, count in shapes[key].most_common() if text),
                lengths[key] if timed else None,
            )
            for key, number in sorted(calls.items(), key=lambda item: (-item[1], item[0]))
        ),
        tuple(
            sorted(
                (GemmCount(*key, int(row[0]), row[1]) for key, row in sums.items()),
                key=lambda one: (-one.flops, one),
            )
        ),
        dict(uncounted),
        tuple(assumed),
        tuple(
            sorted(
                (CollectiveCount(*key, *row) for key, row in spoken.items()),
                key=lambda one: (-one.bytes, one),
            )
        ),
        timed,
        tuple(dict.fromkeys(note for graph in graphs for note in graph.notes)),
    )


def _whole_name(node: ExecutionNode) -> tuple[str, int]:
    """The name without the number of its piece, and that number."""
    found = _PIECE.fullmatch(node.name) if node.is_on_host else None
    return (found[1], int(found[2])) if found else (node.name, 0)


def _products(graph: ExecutionGraph) -> tuple[list[tuple[str, CountedCall]], Counter[str]]:
    """The outermost products whose FLOPs are known, and how many calls say too little."""
    callers = _callers(graph.nodes)
    known: dict[int, tuple[str, CountedCall]] = {}
    missing: dict[int, str] = {}
    for node in graph.nodes:
        name, piece = _whole_name(node)
        if not node.is_on_host or piece or _PRODUCTS.get(name, name) not in FLOP_FORMULAS:
            continue
        counted = _counted(_PRODUCTS.get(name, name), node)
        if counted is None:
            missing[node.id] = name
        else:
            known[node.id] = (name, counted)
    outer = [said for node, said in known.items() if not any(up in known for up in callers(node))]
    # One that says too little and calls one that says enough is counted by that.
    told = {up for node in known for up in callers(node)}
    left = Counter(
        name
        for node, name in missing.items()
        if node not in told and not any(up in known for up in callers(node))
    )
    return outer, left


def _callers(nodes: Sequence[ExecutionNode]) -> Callable[[int], list[int]]:
    """What tells the nodes that called one: Chakra's also depend on kernels and later nodes."""
    host = {node.id for node in nodes if node.is_on_host}
    caller = {
        node.id: min((up for up in node.ctrl_deps if up in host and up < node.id), default=None)
        for node in nodes
    }

    def callers(node: int) -> list[int]:
        found, up = [], caller[node]
        while up is not None:  # Ends, for each has a lower number than the one before.
            found.append(up)
            up = caller[up]
        return found

    return callers


def _counted(name: str, node: ExecutionNode) -> CountedCall | None:
    inputs = node.inputs
    dims, types, given = (_list(part) for part in (inputs.shapes, inputs.types, inputs.values))
    plain = [found[1] if (found := _TENSOR.fullmatch(str(one))) else str(one) for one in types]
    try:
        parts = [msgspec.json.encode(part) for part in (dims, plain, given)]
    except (msgspec.MsgspecError, *_FAULTS):
        return None
    return count_call_flops(name, *parts)


def _list(part: Any) -> list[Any]:
    """A list, which Chakra has as the text that Python would write."""
    found = _literal(part) if isinstance(part, str) else part
    return list(found) if isinstance(found, list | tuple) else []


@lru_cache(1 << 14)
def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except _FAULTS:
        return None


def _shape_text(node: ExecutionNode) -> str:
    """`[512, 1280] [1280, 3840]`: the shapes of its tensors; empty where it has none."""
    shapes = node.inputs.shapes
    if isinstance(shapes, str):
        shapes = _list(shapes)
    return " ".join(str(one) for one in _tensors(shapes))


def _tensors(shapes: Any) -> Iterable[list[Any]]:
    for one in shapes if isinstance(shapes, list | tuple) else ():
        if isinstance(one, list) and one and all(isinstance(size, int) for size in one):
            yield one


def _collectives(nodes: Sequence[ExecutionNode]) -> list[NodeCollective]:
    """Those of the device where the trace has them, for the host's are calls of the same."""
    found = [node for node in nodes if node.collective is not None]
    device = [node for node in found if not node.is_on_host]
    kept = device or [node for node in found if _whole_name(node)[1] == 0]
    return [node.collective for node in kept if node.collective is not None]


def _key(graph: ExecutionGraph, said: NodeCollective) -> tuple[str, str, int, str]:
    size = said.group_size
    for group in graph.process_groups if size < 0 else ():
        listed = group.get("group_size")
        if str(group.get("pg_name")) == said.group and isinstance(listed, int):
            size = listed
    return said.name, said.group or "", size, said.dtype or ""
