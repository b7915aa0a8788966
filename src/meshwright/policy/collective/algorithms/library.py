"""Library of collective algorithms: `build_algorithm` makes one by name, `ALGORITHMS` lists all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.algorithms import (
    all_to_all,
    all_to_all_v,
    bruck,
    direct,
    hierarchical,
    in_network,
    one_to_all,
    pat,
    recursive_halving,
    ring,
    tree,
)
from meshwright.policy.collective.algorithms.algorithm_shape import (
    AlgorithmShape,
    require_valid_shape,
)
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.contract import find_shape_problems


class AlgorithmInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the library says about one of its algorithms."""

    name: str
    title: str
    ops: tuple[CollectiveOp, ...]
    needs: tuple[str, ...] = ()
    """Arguments of `build_algorithm` that it cannot do without."""
    summary: str


AlgorithmBuilders = dict[CollectiveOp, Callable[[AlgorithmShape], Collective]]


class _Entry(NamedTuple):
    algorithm: AlgorithmInfo
    makers: AlgorithmBuilders


def _entry(
    name: str,
    title: str,
    summary: str,
    makers: AlgorithmBuilders,
    needs: tuple[str, ...] = (),
) -> _Entry:
    algorithm = AlgorithmInfo(
        name=name, title=title, ops=tuple(makers), needs=needs, summary=summary
    )
    return _Entry(algorithm, makers)


def _each(
    make: Callable[[CollectiveOp, AlgorithmShape], Collective], *ops: CollectiveOp
) -> AlgorithmBuilders:
    return {op: partial(make, op) for op in ops}


_SHARED: tuple[CollectiveOp, ...] = ("all_reduce", "reduce_scatter", "all_gather")
_STREAMED: tuple[CollectiveOp, ...] = ("all_reduce", "broadcast", "reduce")
_ENTRIES = (
    _entry(
        "ring",
        "Ring",
        "every rank sends to the next only: fewest bytes, 2(n − 1) steps",
        {
            "all_reduce": ring.build_all_reduce,
            "reduce_scatter": ring.build_reduce_scatter,
            "all_gather": ring.build_all_gather,
            "broadcast": ring.build_broadcast,
            "reduce": ring.build_reduce,
        },
    ),
    _entry(
        "chain",
        "Pipelined chain",
        "pieces stream from rank to rank, n − 1 hops",
        _each(tree.build_chain, *_STREAMED),
    ),
    _entry(
        "binary_tree",
        "Binary tree",
        "pieces stream up and down a binary tree, 2·log₂ n hops; half of the ranks send little",
        _each(tree.build_binary, *_STREAMED),
    ),
    _entry(
        "double_tree",
        "Double binary tree",
        "two complementary trees with half of the message each: log hops and full bandwidth",
        _each(tree.build_double_binary, *_STREAMED),
    ),
    _entry(
        "halving_doubling",
        "Recursive halving and doubling",
        "half of what is left to a partner in each step (Rabenseifner): 2·log₂ n steps, few bytes",
        _each(recursive_halving.build_halving_doubling, *_SHARED),
    ),
    _entry(
        "recursive_doubling",
        "Recursive doubling",
        "whole messages at doubling distances: log₂ n steps, for small messages",
        {"all_reduce": recursive_halving.build_recursive_doubling},
    ),
    _entry(
        "bruck",
        "Bruck",
        "⌈log₂ n⌉ steps for any n, for small messages",
        {"all_gather": bruck.build_all_gather, "all_to_all": bruck.build_all_to_all},
    ),
    _entry(
        "pat",
        "Parallel aggregated trees",
        "a binomial tree per rank, far ranks first, several chunks per message",
        {"all_gather": pat.build_all_gather, "reduce_scatter": pat.build_reduce_scatter},
    ),
    _entry(
        "two_level",
        "Two levels, rings between nodes",
        "direct inside nodes, a ring between them on every rail",
        _each(hierarchical.build_two_level, *_SHARED),
        needs=("per_node",),
    ),
    _entry(
        "two_level_halving",
        "Two levels, halving between nodes",
        "direct inside nodes, halving and doubling between them on every rail",
        _each(hierarchical.build_two_level_halving, *_SHARED),
        needs=("per_node",),
    ),
    _entry(
        "three_level",
        "Three levels",
        "direct inside nodes, rings between the nodes of a pod, rings between pods",
        _each(hierarchical.build_three_level, *_SHARED),
        needs=("per_node", "nodes_per_pod"),
    ),
    _entry(
        "nvls",
        "NVLink SHARP",
        "the switch of a node adds and multicasts; rings between nodes on every rail",
        _each(in_network.build_nvls, *_SHARED, "broadcast"),
    ),
    _entry(
        "nvls_tree",
        "NVLink SHARP with trees",
        "the switch of a node adds and multicasts; two trees between nodes on every rail",
        {"all_reduce": in_network.build_nvls_tree},
    ),
    _entry(
        "sharp",
        "SHARP",
        "the fabric adds and multicasts, and inside nodes their switches do",
        _each(in_network.build_sharp, *_SHARED, "broadcast", "reduce"),
    ),
    _entry(
        "one_shot",
        "One shot",
        "everybody gets everything and adds it in the order of the ranks: same bits everywhere",
        {"all_reduce": direct.build_one_shot},
    ),
    _entry(
        "two_shot",
        "Two shots",
        "everybody adds up one share and gives it to all",
        {"all_reduce": direct.build_two_shot},
    ),
    _entry(
        "direct",
        "Direct",
        "everything straight to whom it is for",
        {
            **_each(direct.build_direct_send, "reduce_scatter", "all_gather"),
            "gather": direct.build_gather,
            "scatter": direct.build_scatter,
            "send_recv": direct.build_send_recv,
        },
    ),
    _entry(
        "pairwise",
        "Pairwise exchange",
        "in step t every rank sends to the one t further on",
        {"all_to_all": all_to_all.build_pairwise, "all_to_all_v": all_to_all_v.build_pairwise},
    ),
    _entry(
        "cross_forward",
        "Hierarchical exchange, forwarded behind the crossing",
        "one crossing per rail to the target's node, then NVLink to the target (as DeepEP does)",
        {
            "all_to_all": all_to_all.build_cross_then_forward,
            "all_to_all_v": all_to_all_v.build_cross_then_forward,
        },
        needs=("per_node",),
    ),
    _entry(
        "forward_cross",
        "Hierarchical exchange, forwarded before the crossing",
        "NVLink to the GPU on the target's rail, then one crossing (as NCCL's PXN does)",
        {
            "all_to_all": all_to_all.build_forward_then_cross,
            "all_to_all_v": all_to_all_v.build_forward_then_cross,
        },
        needs=("per_node",),
    ),
    _entry(
        "binomial",
        "Binomial tree",
        "those who have it send it on at halving distances: log₂ n steps",
        _each(one_to_all.build_binomial, "broadcast", "reduce", "gather", "scatter"),
    ),
    _entry(
        "scatter_all_gather",
        "Scatter and all-gather",
        "the root scatters, a ring gathers (van de Geijn), for large messages",
        {"broadcast": one_to_all.build_scatter_all_gather},
    ),
    _entry(
        "over_rails",
        "One copy into each node, over all rails",
        "every NIC sends its share from node to node, neighbours exchange inside",
        {"broadcast": one_to_all.build_rail_broadcast},
        needs=("per_node",),
    ),
)
_OF_OP = {"all_to_all_v": ("counts",), "send_recv": ("peers",)}
"""Arguments that an operation needs, whatever the algorithm."""
_BY_NAME = {entry.algorithm.name: entry for entry in _ENTRIES}

ALGORITHMS: tuple[AlgorithmInfo, ...] = tuple(entry.algorithm for entry in _ENTRIES)


def build_algorithm(
    name: str,
    op: CollectiveOp,
    ranks: int,
    *,
    per_node: int | None = None,
    nodes_per_pod: int | None = None,
    channels: int = 1,
    pieces: int | None = None,
    aggregate: int | None = None,
    root: int = 0,
    orders: Sequence[Sequence[int]] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    peers: Sequence[int] | None = None,
) -> Collective:
    """Return an algorithm of the library for so many ranks.

    `per_node` and `nodes_per_pod` say how the ranks lie; `channels` are parallel lanes, each with
    its part of the message; `pieces` stream one after the other on a lane; `aggregate` is how many
    ranks' chunks PAT puts into one message. `orders` are those of the ranks around the ring of
    each channel, `counts` the chunks each rank has for each other in an all_to_all_v, `peers` the
    rank that each rank sends to in a send_recv.
    """
    entry = _BY_NAME.get(name)
    if entry is None:
        fix = f"use one of {', '.join(_BY_NAME)}"
        raise InputError([Problem("name", f"the library has no algorithm {name!r}", fix)])
    make = entry.makers.get(op)
    if make is None:
        others = [each.algorithm.name for each in _ENTRIES if op in each.makers]
        fix = f"use it for {', '.join(entry.makers)}"
        if others:
            fix += f", or another algorithm for {op}: {', '.join(others)}"
        raise InputError([Problem("op", f"{name} is no algorithm for {op!r}", fix)])
    shape = require_valid_shape(
        name,
        op,
        AlgorithmShape(
            ranks=ranks,
            per_node=per_node,
            nodes_per_pod=nodes_per_pod,
            channels=channels if channels < 1 else max(channels, len(orders or ())),
            pieces=pieces,
            aggregate=aggregate,
            root=root,
            orders=tuple(tuple(order) for order in orders or ()),
            counts=tuple(tuple(row) for row in counts or ()),
            peers=tuple(peers or ()),
        ),
        (*entry.algorithm.needs, *_OF_OP.get(op, ())),
    )
    made = make(shape)
    problems = find_shape_problems(made)
    if problems:
        raise InputError(problems)
    return made
