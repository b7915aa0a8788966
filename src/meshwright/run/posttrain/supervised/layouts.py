"""Which layouts an adapter cannot be trained under, told before anything runs."""

from collections.abc import Iterator
from importlib.util import find_spec

from meshwright.errors import Problem
from meshwright.run.posttrain.adapters.settings import AdapterSettings
from meshwright.spec.layout import Layout
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Model


def layout_problems(model: Model, layout: Layout, adapter: AdapterSettings) -> Iterator[Problem]:
    """Yield what keeps an adapter from being trained under a layout, each with a fix."""
    if layout.precision == "fp16":
        what = "adapters are not trained beside fp16 weights"
        yield Problem("layout.precision", what, "use bf16 or fp32")
    if layout.zero in (1, 2):
        what = f"ZeRO {layout.zero} cuts what an optimizer keeps, of which an adapter has little"
        yield Problem("layout.zero", what, "use 3, which cuts the frozen weights, or 0")
    if layout.tp > 1 and layout.overlap_tp:
        what = "products with an adapter are not cut into pieces that overlap with exchanges"
        yield Problem("layout.overlap_tp", what, "leave it out")
    if layout.pp * layout.cp > 1 and adapter.dropout:
        axis = "pp" if layout.pp > 1 else "cp"
        what = f"under layout.{axis} other inputs would be left out than on one device"
        yield Problem("adapter.dropout", what, f"use 0, or layout.tp in place of layout.{axis}")
    if layout.optimizer == "muon" and layout.tp > 1:
        what = "Muon makes whole matrices of a model's own parts alone, not of an adapter's"
        yield Problem("layout.optimizer", what, "use adamw, or no tp")
    yield from _idle_stages(model, layout, adapter)


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
