"""Pipeline chunks and batch sizes in torchtitan's keys."""

from typing import Any

from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.layer_pattern import MAX_LAYERS
from meshwright.spec.model.model import Model

# torch/distributed/pipelining/schedules.py, `get_schedule_class`.
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_SEVERAL = frozenset({"interleavedzerobubble", "loopedbfs"})  # chunked, and not held by a layout
_SCHEDULES_BACK = {word.lower(): kind for kind, word in _SCHEDULES.items()}
_SINGLE = frozenset({"gpipe", "1f1b"})


def write_pipeline(layout: Layout, model: Model | None) -> dict[str, Any]:
    """Return the keys of the pipeline and of the split of layers."""
    if layout.pp == 1:
        return {"parallelism.pipeline_parallel_degree": 1}
    several = layout.virtual_stages > 1
    kind = layout.schedule
    if kind not in _SCHEDULES or (kind in _SINGLE) == several:
        kind = "interleaved" if several else "1f1b"
    keys: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.pipeline_parallel_schedule": _SCHEDULES[kind],
        "parallelism.pipeline_parallel_microbatch_size": layout.microbatch,
    }
    if kind == "dualpipe-v":
        keys["parallelism.pipeline_parallel_expert_parallel_overlap"] = layout.overlap_ep
    split = layout.stage_layers
    if split is None and several and layout.virtual_stages != 2 and model is not None:
        each, extra = divmod(model.layers, layout.chunks)
        split = tuple(each + (index < extra) for index in range(layout.chunks))
    if split is not None:
        return keys | {"parallelism.module_fqns_per_model_part": _modules(split)}
    # torchtitan takes a layer off the first and the last stage unless told otherwise.
    return keys | {
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    }


def _modules(split: tuple[int, ...]) -> list[list[str]]:
    parts: list[list[str]] = []
    first = 0
    for count in split:
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def write_batch(layout: Layout) -> dict[str, Any]:
    """Return the keys of the batch sizes."""
    batch = layout.global_batch
    local = layout.microbatch
    if layout.pp > 1:
        # The pipeline cuts one local batch into microbatches.
        local = batch // layout.dp if batch is not None else layout.microbatch * layout.chunks
    return {"training.local_batch_size": local, "training.global_batch_size": batch or -1}


def read_pipeline(settings: FrameworkConfig, layers: int | None) -> dict[str, Any]:
    """Return `pp`, `schedule`, `virtual_stages` and `stage_layers`."""
    pp = settings.integer("parallelism.pipeline_parallel_degree", 1)
    word = (settings.text("parallelism.pipeline_parallel_schedule") or "1F1B").lower()
    kind = _SCHEDULES_BACK.get(word)
    if kind is None:
        kind = "interleaved" if word in _SEVERAL else "1f1b"
        settings.add_note(
            "parallelism.pipeline_parallel_schedule", f"{word!r} cannot be held; {kind} is read"
        )
    if pp == 1:
        return {"pp": 1, "schedule": "1f1b"}
    fields: dict[str, Any] = {"pp": pp, "schedule": kind}
    virtual = 1 if kind in _SINGLE else 2
    parts = settings.raw("parallelism.module_fqns_per_model_part")
    if parts is not None:
        return fields | _read_parts(settings, parts, pp)
    first = settings.integer("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0)
    last = settings.integer("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0)
    each = settings.optional_integer("parallelism.pipeline_parallel_layers_per_stage")
    if each is not None and layers is not None:
        virtual = max(1, -(-(layers + first + last) // each) // pp)
    elif each is not None:
        settings.add_note(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"the number of layers is not known; {virtual} chunks per rank are read",
        )
    fields["virtual_stages"] = virtual
    if (first, last) != (0, 0):
        chunks = pp * virtual
        if layers is None or chunks > MAX_LAYERS:
            settings.add_note(
                "parallelism.pipeline_parallel_first_stage_less_layers",
                "the first and last stage get fewer layers; without the model the split is even",
            )
        else:
            fields["stage_layers"] = _uneven(layers, chunks, first, last)
    return fields


def _uneven(layers: int, chunks: int, first: int, last: int) -> tuple[int, ...]:
    """Share out layers as torchtitan does, embedding and head counting as layers."""
    each, extra = divmod(layers + first + last, chunks)
    split = [each + (index < extra) for index in range(chunks)]
    split[0] = max(0, split[0] - first)
    split[-1] = max(0, split[-1] - last)
    return tuple(split)


def _read_parts(settings: FrameworkConfig, parts: Any, pp: int) -> dict[str, Any]:
    key = "parallelism.module_fqns_per_model_part"
    sound = isinstance(parts, list | tuple) and all(
        isinstance(part, list | tuple) for part in parts
    )
    if not sound or not parts or len(parts) % pp:
        settings.add_problem(key, f"is not a list of module lists that {pp} stages can share",
                       f"give {pp} lists of module names, or a multiple")  # fmt: skip
        return {}
    split = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
    return {"virtual_stages": len(parts) // pp, "stage_layers": split}


def read_batch(settings: FrameworkConfig, pp: int, dp: int) -> dict[str, Any]:
    """Return `microbatch` and `global_batch`."""
    local = settings.integer("training.local_batch_size", 8)
    batch = settings.integer("training.global_batch_size", -1, least=-1)
    if pp == 1:
        return {"microbatch": local, "global_batch": batch if batch > 0 else None}
    micro = settings.integer("parallelism.pipeline_parallel_microbatch_size", 1)
    if local % micro:
        settings.add_problem(
            "training.local_batch_size", f"{local} is not a multiple of {micro}",
            f"use {-(-local // micro) * micro}",
        )  # fmt: skip
    if batch > local * dp:
        settings.add_note(
            "training.global_batch_size",
            f"the pipeline drains {batch // (local * dp)} times per step; one long run is read",
        )
    return {"microbatch": micro, "global_batch": batch if batch > 0 else local * dp}
