"""The collectives of one layer in the order they run, each with its full length.

The cost model says how long a pass waits for them. What they take in full comes from the same
functions with nothing to hide behind. Only the drawing of a step needs this; its length does not.
"""

import copy
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from meshwright.predict.block_comm import BlockComm, block_comm, place, ring_s
from meshwright.predict.block_time import Passes
from meshwright.predict.bubble import rank_times
from meshwright.predict.network import collective_s
from meshwright.predict.run import Run
from meshwright.predict.stage_time import chunk_times
from meshwright.predict.step import sharded_exchange
from meshwright.spec.layout import rank_chunks, rank_parameters
from meshwright.spec.layout.states import STATE_BYTES
from meshwright.spec.model import Attention, Block, Experts, LatentAttention

_CONTEXT = {"ulysses": "all_to_all", "allgather": "all_gather"}
"""The collective of each kind of context parallelism; rings send and receive."""


class Collective(NamedTuple):
    """One collective of a layer."""

    group: str
    """The process group: tp, cp, ep or dp."""
    name: str
    part: Literal["mixer", "mlp", "layer"]
    """What it belongs to."""
    before: bool
    """It runs ahead of the compute of its part, or behind it."""
    seconds: float
    nbytes: int = -1


LayerCollectives = dict[str, tuple[Collective, ...]]
"""By pass, F or B; those that compute waits for first come first in each group."""


def block_collectives(run: Run, block: Block) -> LayerCollectives:
    """Return the collectives of a block, those of sharded parameters apart."""
    full = _full(run, block)
    return {
        "F": (*_tensor(run, block, "F", full.tp_forward), *_others(run, block, full, "F")),
        "B": (*_tensor(run, block, "B", full.tp_backward), *_others(run, block, full, "B")),
    }


def _full(run: Run, block: Block) -> BlockComm:
    """Return how long a block communicates where nothing can hide."""
    apart = copy.copy(run)
    apart.layout = msgspec.structs.replace(run.layout, overlap_tp=False, overlap_ep=False)
    apart.software = msgspec.structs.replace(run.software, tp_overlap=False)
    comm = block_comm(apart, block, Passes())
    mixer = block.mixer
    rings = run.layout.cp > 1 and run.layout.cp_kind not in ("ulysses", "allgather")
    if not rings or not isinstance(mixer, Attention | LatentAttention):
        return comm
    # A ring always has attention to hide behind.
    ring = ring_s(run, mixer)
    return comm._replace(cp_forward=ring, cp_backward=2 * ring)


def _tensor(run: Run, block: Block, way: str, seconds: float) -> Iterator[Collective]:
    """Around every part: a gather and a scatter, or one reduction behind it."""
    layout = run.layout
    if layout.tp == 1:
        return
    parts: list[Literal["mixer", "mlp"]] = ["mixer"] if block.mixer is not None else []
    if block.mlp is not None and not (isinstance(block.mlp, Experts) and layout.experts_tp == 1):
        parts.append("mlp")
    size = 2 * run.tokens * run.model.hidden
    if not layout.sequence_parallel:
        for part in parts:
            yield Collective("tp", "all_reduce", part, False, seconds / len(parts), size)
        return
    group = place(run.cluster, layout, "tp")
    gather, scatter = (
        collective_s(group, n, float(size)) for n in ("all_gather", "reduce_scatter")
    )
    # Backward gathers gradients, which it waits for, and inputs again beside its first product.
    gathers = 2 if way == "B" else 1
    share = seconds / len(parts) / (gathers * gather + scatter)
    for _ in range(gathers):
        for part in parts:
            yield Collective("tp", "all_gather", part, True, share * gather, size)
    for part in parts:
        yield Collective("tp", "reduce_scatter", part, False, share * scatter, size)


def _others(run: Run, block: Block, full: BlockComm, way: str) -> Iterator[Collective]:
    context, experts = (
        (full.cp_forward, full.ep_forward) if way == "F" else (full.cp_backward, full.ep_backward)
    )
    if context:
        name = _CONTEXT.get(run.layout.cp_kind, "send_recv")
        yield Collective("cp", name, "mixer", False, context)
    if experts and isinstance(block.mlp, Experts):
        width = block.mlp.latent or run.model.hidden
        size = 2 * (run.tokens // run.layout.tp) * block.mlp.top_k * width
        for before in (True, False):
            yield Collective("ep", "all_to_all", "mlp", before, experts / 2, size)


def sharded_collectives(run: Run) -> list[LayerCollectives]:
    """Return, by rank, the gathers and scatters of one layer of fully sharded parameters."""
    layout = run.layout
    if layout.zero < 3 or layout.dp * layout.cp == 1:
        return [{"F": (), "B": ()} for _ in range(layout.pp)]
    apart = copy.copy(run)
    apart.software = msgspec.structs.replace(run.software, overlap_sharded=False)
    number = 0 if run.frozen else STATE_BYTES[layout.gradient_precision]
    found: list[LayerCollectives] = []
    held = zip(
        rank_times(run, chunk_times(run)),
        rank_parameters(layout, run.model),
        rank_chunks(layout, run.model.layers),
        strict=True,
    )
    for stage, parameters, some in held:
        layers = max(1, sum(chunk.last - chunk.first for chunk in some))
        # Two gathers of two bytes a parameter, and a scatter of its gradient.
        each = sharded_exchange(apart, stage, parameters) / layers / (4 + number)
        size = parameters.total // layers
        gather = Collective("dp", "all_gather", "layer", True, 2 * each, 2 * size)
        scatter = Collective("dp", "reduce_scatter", "layer", False, number * each, number * size)
        found.append({"F": (gather,), "B": (gather, scatter) if number else (gather,)})
    return found
