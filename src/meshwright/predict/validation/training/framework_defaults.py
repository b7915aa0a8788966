"""What the software of a published run is known to do, where its row does not say.

Facts about programs, from their code or documentation: the format in which gradients are summed,
how layers are dealt to pipeline stages, how a batch is cut. They change a layout read from a row;
numbers that would have to be fitted have no place here.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

BF16_GRADIENT_FRAMEWORKS = ("bridge", "dgxc", "internevo", "mlperf", "nemo")
"""Programs that sum gradients in bf16: InternEvo, and the performance recipes of NVIDIA's NeMo and
Megatron-Bridge (`grad_reduce_in_fp32` off), which the others run. Megatron-LM, DeepSpeed, nanotron
and PyTorch sum bf16 gradients in fp32; all sum those of fp16 training in fp16."""
COST_SPLIT_FRAMEWORKS = ("nanotron",)
"""Programs that fill one pipeline stage after the other up to its share of all matrix entries."""


MAX_HEAD_LAYERS = 1.5
"""Layers up to which a head takes the place of one."""


def apply_framework_defaults(row: Mapping[str, Any], layout: Layout, model: Model) -> Layout:
    """Return the layout of a row as its software runs it; doing so twice changes nothing."""
    named = f"{row.get('family') or ''} {row.get('source') or ''}".lower()
    layout = _changed(layout, gradient_precision=_sums(named, layout))
    notes = str(row.get("notes") or "").lower()
    offloads = re.search(r"activation (?:cpu-)?offload(?:ing)?(?: of (\d+) layers)?", notes)
    if offloads:
        layout = _offloaded(layout, offloads[1])
    if layout.zero == 3 and _names_nothing(row["layout"]):
        # PyTorch's way: the output of every second product is kept.
        nothing: dict[str, Any] = {"recompute_ops": (), "recompute_layers": None}
        layout = _changed(layout, recompute="selective", **nothing)
    if layout.pp == 1:
        return layout
    layout = _interleaved(row, layout, model.layers)
    if row.get("micro_batch") is None and layout.zero == 3 and layout.global_batch:
        # PyTorch's pipelines cut a batch into as many microbatches as there are chunks.
        share = layout.global_batch // (layout.dp * layout.chunks)
        layout = _changed(layout, microbatch=max(1, share))
    if any(name in named for name in COST_SPLIT_FRAMEWORKS) and layout.virtual_stages == 1:
        return _changed(layout, stage_layers=split_by_cost(model, layout.pp))
    if count_head_layers(model) < MAX_HEAD_LAYERS:
        layout = _changed(layout, stage_layers=_lighter_ends(layout, model.layers))
    return layout


def count_head_layers(model: Model) -> float:
    """Return what the head, and the extra layers that predict further tokens, weigh in layers."""
    work = {
        block.name: sum(
            weight.flops
            for part in (block.mixer, block.mlp)
            if part is not None
            for weight in part.list_weights(model.hidden)
        )
        for block in model.blocks
    }
    mean = sum(work[name] for name in model.layer_names) / model.layers
    extra = model.multi_token.depth if model.multi_token is not None else 0
    return 2 * model.hidden * model.vocab * (1 + extra) / mean + extra


def split_by_cost(model: Model, stages: int) -> tuple[int, ...]:
    """Deal layers to stages in order, going on once a stage's share of all entries is passed.

    The head counts as a layer of its own size, the embedding as nothing.
    """
    sizes = {
        block.name: sum(
            weight.copies * weight.entries_per_copy for weight in block.list_weights(model.hidden)
        )
        for block in model.blocks
    }
    whole = sum(sizes[name] for name in model.layer_names) + model.vocab * model.hidden
    counts, passed = [0] * stages, 0
    stage = 0
    for name in model.layer_names:
        counts[stage] += 1
        passed += sizes[name]
        if passed > whole * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(counts)


def _offloaded(layout: Layout, layers: str | None) -> Layout:
    """Offload activations, of so many layers per chunk where the row says it."""
    away = layout.offload
    if "activations" not in away:
        away = (*away, "activations")
    return _changed(layout, offload=away, offload_layers=int(layers) if layers else None)


def _sums(named: str, layout: Layout) -> str:
    if layout.precision == "fp16":
        return "fp16"
    two = layout.zero < 3 and any(name in named for name in BF16_GRADIENT_FRAMEWORKS)
    return "bf16" if two else layout.gradient_precision


def _names_nothing(given: Mapping[str, Any]) -> bool:
    return given.get("recompute") == "selective" and given.get("recompute_detail") is None


def _interleaved(row: Mapping[str, Any], layout: Layout, layers: int) -> Layout:
    """Give an interleaved schedule of unsaid depth the fewest chunks that divide its layers."""
    given = row["layout"]
    if "interleaved" not in str(given.get("schedule")) or given.get("vpp"):
        return layout
    each = -(-layers // layout.pp)
    chunks = next((count for count in range(2, each + 1) if each % count == 0), 1)
    if chunks in {1, layout.virtual_stages}:
        return layout
    return _changed(layout, schedule="interleaved", virtual_stages=chunks, stage_layers=None)


def _lighter_ends(layout: Layout, layers: int) -> tuple[int, ...] | None:
    """Take one layer from the first and the last chunk where that makes the rest even.

    Models are cut to such sizes (46 layers on 16 stages, 126 on 8) so that embedding and head take
    the place of a layer each.
    """
    each, rest = divmod(layers + 2, layout.chunks)
    if rest or layers % layout.chunks == 0 or layout.chunks < 2:
        return layout.stage_layers
    return (each - 1, *(layout.chunks - 2) * (each,), each - 1)


def _changed(layout: Layout, **fields: Any) -> Layout:
    """Return the layout with some fields changed, or as it is where they contradict the rest."""
    try:
        return replace(layout, **fields)
    except InputError:
        return layout
