"""What a pass consists of, layer by layer: kernels, and collectives with what compute waits for.

The predicted pieces of a pass say how long it computes and how long it waits. They are dealt to
its layers in the order they run. Only the drawing of a step needs this; its length does not.
"""

import copy
from typing import NamedTuple

import msgspec

from meshwright.policy.pipeline.spans import NAMES
from meshwright.predict.block_time import block_passes
from meshwright.predict.pass_time import NO_WAITS, PassTable, Pieces, pass_table
from meshwright.predict.run import Run
from meshwright.predict.simulate_collectives import (
    Collective,
    block_collectives,
    host_copies,
    sharded_collectives,
)
from meshwright.predict.stage_time import chunk_times
from meshwright.spec.layout import Chunk
from meshwright.spec.model import Attention, Block, Experts, LatentAttention


class Segment(NamedTuple):
    """A kernel, or a collective and how long compute waits for it."""

    name: str
    seconds: float
    layer: int = -1
    collective: Collective | None = None
    exposed: float = 0.0


class Layers:
    """Deals the pieces of passes to the layers of a run."""

    def __init__(self, run: Run) -> None:
        self._run, self._names = run, run.model.layer_names
        self._tables = _layer_tables(run)
        self._collectives = {one.name: block_collectives(run, one) for one in run.model.blocks}
        self._sharded, self._copies = sharded_collectives(run), host_copies(run)
        self._parts = {one.name: _parts(run, one) for one in run.model.blocks}

    def segments(self, op: str, chunk: Chunk, pieces: Pieces) -> list[list[Segment]]:
        """Return what a pass over a chunk consists of, layer by layer in the order it runs."""
        inside = range(chunk.first, chunk.last)
        order = list(inside if op == "F" else reversed(inside))
        known = [self._tables[self._names[layer]][op, 0] for layer in order]
        whole = Pieces(*map(sum, zip(*known, strict=True))) if known else Pieces()
        ends = chunk.has_embedding or chunk.has_head or not known
        # A difference in the last digits is rounding, not an embedding.
        fits = ends and pieces.compute - whole.compute > 1e-9 * pieces.compute
        factor = Pieces(*(a / b if b else 0.0 for a, b in zip(pieces, whole, strict=True)))
        each = 1 / max(1, len(order))
        factor = factor._replace(dp=pieces.dp * each, offload=pieces.offload * each)
        if fits:
            factor = factor._replace(compute=1.0)
        found = [
            self._layer(op, layer, chunk, own, factor)
            for layer, own in zip(order, known, strict=True)
        ]
        if fits:
            label = "head" if chunk.has_head else "embedding"
            end = [Segment(f"{label} {NAMES[op]}", pieces.compute - whole.compute)]
            # The head comes last forward and first backward, the embedding the other way round.
            return [*found, end] if chunk.has_head == (op == "F") else [end, *found]
        return found

    def _layer(
        self, op: str, layer: int, chunk: Chunk, own: Pieces, factor: Pieces
    ) -> list[Segment]:
        name = self._names[layer]
        way = "F" if op == "F" else "B"
        some: tuple[Collective, ...] = ()
        if op != "W":
            some = (*self._collectives[name][way], *self._copies[chunk.position][way])
            if factor.dp:  # the backward that ends a step may leave them to the buckets
                some += self._sharded[chunk.rank][way]
        waits = {"tp": own.tp * factor.tp, "cp": own.cp * factor.cp, "ep": own.ep * factor.ep}
        waits |= {"dp": factor.dp, "host": factor.offload}
        around: dict[tuple[str, bool], list[Segment]] = {}
        last = {one.group: index for index, one in enumerate(some)}
        for index, one in enumerate(some):
            # What exceeds all collectives of a group stretches the last: heads have some as well.
            left = waits[one.group]
            exposed = left if index == last[one.group] else min(one.seconds, left)
            waits[one.group] -= exposed
            segment = Segment(one.name, one.seconds, layer, one, exposed)
            around.setdefault((one.part, one.before), []).append(segment)
        found = around.get(("layer", True), [])
        if own.recompute:
            found = [*found, Segment("recompute", own.recompute * factor.recompute, layer)]
        parts = self._parts[name][op]
        for part, label, share in parts if op == "F" else reversed(parts):
            compute = Segment(f"{label} {NAMES[op]}", own.compute * factor.compute * share, layer)
            found = [*found, *around.get((part, True), []), compute, *around.get((part, False), [])]
        return [*found, *around.get(("layer", False), [])]


def _layer_tables(run: Run) -> dict[str, PassTable]:
    """Return the passes over one layer of every kind, by predicting each layer as a stage."""
    names = run.model.layer_names
    alone = copy.copy(run)
    alone.layout = msgspec.structs.replace(
        run.layout,
        pp=len(names),
        virtual_stages=1,
        schedule="1f1b",
        stage_layers=(1,) * len(names),
    )
    times = chunk_times(alone)
    # The first and the last stage have embedding and head beside their layer.
    inner = list(range(1, len(names) - 1))
    at = {names[layer]: layer for layer in (0, len(names) - 1, *inner)}
    return {name: pass_table((times[layer],), (NO_WAITS,)) for name, layer in at.items()}


def _parts(run: Run, block: Block) -> dict[str, list[tuple[str, str, float]]]:
    """Return, by pass, the parts of a block with what they are called and their compute's share."""
    mixer, mlp = block.mixer, block.mlp
    attends = isinstance(mixer, Attention | LatentAttention)
    labels = {
        "mixer": "attention" if attends else type(mixer).__name__.lower(),
        "mlp": "experts" if isinstance(mlp, Experts) else "mlp",
    }
    if mixer is None or mlp is None:
        part = "mlp" if mixer is None else "mixer"
        return {op: [(part, labels[part], 1.0)] for op in NAMES}
    whole = block_passes(run, block)
    own = block_passes(run, msgspec.structs.replace(block, mlp=None))
    shares = {
        "F": own.forward / whole.forward,
        "B": own.backward / whole.backward,
        "I": own.input_gradient / whole.input_gradient,
        "W": own.weight_gradient / whole.weight_gradient if whole.weight_gradient else 0.5,
    }
    return {
        op: [("mixer", labels["mixer"], share), ("mlp", labels["mlp"], 1 - share)]
        for op, share in shares.items()
    }
