"""The collectives of one layer in the order they run, each with its full length.

The cost model says how long a pass waits for them. What they take in full comes from the same
functions with nothing to hide behind. Only the drawing of a step needs this; its length does not.
"""

import copy
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from meshwright.predict.adapters import trained_parameters
from meshwright.predict.block_comm import BlockComm, block_comm, ring_s
from meshwright.predict.block_time import Passes
from meshwright.predict.measured import exchange_s
from meshwright.predict.offload import Moved, pass_traffic, transfer_s
from meshwright.predict.run import Run
from meshwright.predict.step import layer_exchange
from meshwright.spec.layout import rank_chunks, rank_parameters, split_layers
from meshwright.spec.layout.states import STATE_BYTES
from meshwright.spec.model import Attention, Block, Experts, LatentAttention

_CONTEXT = {"ulysses": "all_to_all", "allgather": "all_gather"}
"""The collective of each kind of context parallelism; rings send and receive."""


class Collective(NamedTuple):
    """One collective of a layer, or one copy between device and host."""

    group: str
    """The process group: tp, cp, ep or dp; `host` for a copy."""
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
    if run.measured is not None or not rings or not isinstance(mixer, Attention | LatentAttention):
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
    gather = exchange_s(run, "tp", "all_gather", float(size))
    scatter = exchange_s(run, "tp", "reduce_scatter", float(size))
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
    """Return, by rank, the gathers and scatters of one layer of sharded states in every pass."""
    layout = run.layout
    if layout.zero < 2 or layout.dp * layout.cp == 1:
        return [{"F": (), "B": ()} for _ in range(layout.pp)]
    mean = max(1, run.model.layers // layout.pp)
    number = STATE_BYTES[layout.gradient_precision]
    found: list[LayerCollectives] = []
    held = zip(
        rank_parameters(layout, run.model),
        trained_parameters(run),
        rank_chunks(layout, run.model.layers),
        strict=True,
    )
    for parameters, trained, some in held:
        layers = max(1, sum(chunk.last - chunk.first for chunk in some))
        # The closed form cuts every rank into as many layers as ranks have on the mean.
        gather_s, scatter_s = (
            mean / layers * seconds for seconds in layer_exchange(run, parameters, mean, trained)
        )
        size = 2 * parameters.total // layers
        gather = Collective("dp", "all_gather", "layer", True, gather_s, size)
        size = number * trained.total // layers
        scatter = Collective("dp", "reduce_scatter", "layer", False, scatter_s, size)
        before = (gather,) if layout.zero == 3 else ()
        found.append({"F": before, "B": (*before, scatter)})
    return found


def host_copies(run: Run) -> list[LayerCollectives]:
    """Return, by chunk, what one layer's passes copy between device and host."""
    layout, names = run.layout, {(True, False): "to host", (False, True): "from host"}
    if not layout.offload:
        return [{"F": (), "B": ()} for _ in range(layout.chunks)]

    def copies(moved: Moved, layers: int) -> tuple[Collective, ...]:
        if not any(moved):
            return ()
        name = f"copy {names.get((moved.down > 0, moved.up > 0), 'to and from host')}"
        seconds, size = transfer_s(run, moved) / layers, round(sum(moved) / layers)
        return (Collective("host", name, "layer", moved.up > 0, seconds, size),)

    layers = [max(1, count) for count in split_layers(layout, run.model.layers)]
    return [
        {"F": copies(each.forward, count), "B": copies(each.backward, count)}
        for each, count in zip(pass_traffic(run), layers, strict=True)
    ]
