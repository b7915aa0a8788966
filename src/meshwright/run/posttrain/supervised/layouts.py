"""Which layouts a recipe cannot be trained under, told before anything runs."""

from collections.abc import Iterator
from importlib.util import find_spec

from meshwright.errors import Problem
from meshwright.run.posttrain.supervised.settings import AdapterSettings
from meshwright.spec.layout import Layout
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Model

_JUDGING = ("dpo", "ipo", "kto", "reward", "distil")
"""Recipes whose loss is made of whole answers, or of words at all their tokens."""


def layout_problems(
    kind: str, model: Model, layout: Layout, adapter: AdapterSettings | None
) -> Iterator[Problem]:
    """Yield what keeps a recipe from running under a layout, each with a fix."""
    if layout.cp > 1 and kind in _JUDGING:
        what = f"{kind} judges whole answers, and context-parallel ranks have parts of them"
        yield Problem("layout.cp", what, "use cp = 1, and tp with sequence_parallel, or pp")
    if adapter is not None:
        yield from _beside_an_adapter(layout, adapter)
        yield from _idle_stages(model, layout, adapter)


def _beside_an_adapter(layout: Layout, adapter: AdapterSettings) -> Iterator[Problem]:
    if layout.precision == "fp16":
        what = "adapters are not trained beside fp16 weights"
        yield Problem("layout.precision", what, "use bf16 or fp32")
    if layout.zero:
        what = f"ZeRO {layout.zero} cuts what learns: of an adapter little, of frozen weights none"
        yield Problem(
            "layout.zero", what, "use zero = 0, and tp or pp where the model is too large"
        )
    if layout.tp > 1 and layout.overlap_tp:
        what = "products with an adapter are not cut into pieces that overlap with exchanges"
        yield Problem("layout.overlap_tp", what, "leave it out")
    if layout.pp > 1 and adapter.dropout:
        what = f"what dropout leaves out follows the order of layers, which {layout.pp} stages lack"
        yield Problem("adapter.dropout", what, "use 0, or layout.tp in place of layout.pp")
    if layout.optimizer == "muon" and layout.tp * layout.pp > 1:
        what = "Muon makes whole matrices of a model's own parts alone, not of an adapter's"
        yield Problem("layout.optimizer", what, "use adamw, or dp alone")


def _idle_stages(model: Model, layout: Layout, adapter: AdapterSettings) -> Iterator[Problem]:
    """Find stages without a layer that the adapter's targets name."""
    # A login node that only writes a job may lack torch; the ranks look again.
    if layout.pp == 1 or find_spec("torch") is None:
        return
    from meshwright.run.nn.build import build
    from meshwright.run.posttrain.adapters.adapter import layers_chosen

    chosen = layers_chosen(build(model), adapter.lora())
    for rank, chunks in enumerate(rank_chunks(layout, model.layers)):
        held = {index for chunk in chunks for index in range(chunk.first, chunk.last)}
        if chosen and not held & chosen:
            what = f"pipeline rank {rank} has no layer that {adapter.targets!r} names"
            yield Problem("adapter.targets", what, "name modules of every stage, or use less pp")
