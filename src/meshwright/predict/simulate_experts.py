"""How much longer a pass gets when one expert rank has more tokens than the others.

Products of experts cost more with more tokens, but not in proportion: with few tokens, reading the
weights sets their time. So the growth is taken from the cost model itself, as the difference that
one more expert per token makes.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.predict.block_time import Passes, block_passes
from meshwright.predict.run import Run
from meshwright.spec.layout import Chunk, chunks
from meshwright.spec.model import Block, Experts


class Growth(NamedTuple):
    """Seconds that a pass grows by where the busiest rank has twice the mean tokens."""

    recompute: float = 0.0
    compute: float = 0.0


def expert_passes(run: Run, block: Block) -> Passes:
    """Return how much longer a block's compute gets by as many tokens again."""
    experts = block.mlp
    if not isinstance(experts, Experts) or run.layout.ep == 1 or experts.count == 1:
        return Passes()  # a rank that holds every expert has the same tokens whatever they choose
    more = 1 if experts.top_k < experts.count else -1
    other = msgspec.structs.replace(experts, top_k=experts.top_k + more)
    grown = block_passes(run, msgspec.structs.replace(block, mlp=other))
    usual = block_passes(run, block)
    share = experts.top_k * more
    return Passes(
        share * (grown.forward - usual.forward),
        share * (grown.input_gradient - usual.input_gradient),
        share * (grown.weight_gradient - usual.weight_gradient),
    )


def chunk_growth(run: Run) -> dict[tuple[str, int], Growth]:
    """Return the growth of every pass over every chunk."""
    each = {block.name: expert_passes(run, block) for block in run.model.blocks}
    found: dict[tuple[str, int], Growth] = {}
    for chunk in chunks(run.layout, run.model.layers):
        total = sum((each[name] for name in _names(run, chunk)), Passes())
        again = 0.0
        if run.layout.recompute == "full":
            covered = run.layout.recompute_layers
            layers = max(1, chunk.last - chunk.first)
            again = total.forward * (1 if covered is None else min(1.0, covered / layers))
        at = chunk.position
        found["F", at] = Growth(0.0, total.forward)
        found["B", at] = Growth(again, total.backward)
        found["I", at] = Growth(again, total.input_gradient)
        found["W", at] = Growth(0.0, total.weight_gradient)
    return found


def expert_layers(run: Run) -> npt.NDArray[np.float64]:
    """Return how many layers of every chunk have experts."""
    has = {block.name: isinstance(block.mlp, Experts) for block in run.model.blocks}
    held = {one.position: one for one in chunks(run.layout, run.model.layers)}
    counts = [sum(has[name] for name in _names(run, held[at])) for at in range(len(held))]
    return np.array(counts, dtype=np.float64)


def _names(run: Run, chunk: Chunk) -> tuple[str, ...]:
    names = run.model.layer_names[chunk.first : chunk.last]
    heads = run.model.multi_token
    return names if heads is None or not chunk.has_head else (*names, *[heads.block] * heads.depth)
