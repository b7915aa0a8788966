"""A `Layout` in torchtitan's keys, and back."""

import math
from typing import Any

from meshwright.errors import Problem
from meshwright.spec.bridge.export_report import Reasons, read_layout
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.fsdp2.fully_shard_config import HOST_STATES
from meshwright.spec.bridge.torchtitan import pipeline
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

_ROTATE = {"ring": "alltoall", "allgather": "allgather"}
# Per-operation checkpointing keeps attention and every second product and computes the rest again
# (torchtitan/distributed/activation_checkpoint.py).
_OP_POLICY = ("layernorm", "mlp_act")
_CONVERTERS = {
    "fp8-tensorwise": "quantize.linear.float8",
    "fp8-rowwise": "quantize.linear.float8",
    "mxfp8": "quantize.linear.mx",
}


def write_parallelism(layout: Layout, model: Model | None) -> dict[str, Any]:
    """Return torchtitan's keys by dotted path."""
    return {
        **_write_degrees(layout),
        **pipeline.write_pipeline(layout, model),
        **pipeline.write_batch(layout),
        **_write_numbers(layout),
        **_write_recompute(layout),
    }


def _write_degrees(layout: Layout) -> dict[str, Any]:
    shard = layout.dp if layout.zero else 1
    if layout.zero and layout.shard_degree % layout.cp == 0:
        shard = layout.shard_degree // layout.cp  # the key counts without context parallelism
    reshard = {0: "default", 3: "default" if layout.pp == 1 else "always"}
    keys: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": layout.dp // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.fsdp_reshard_after_forward": reshard.get(layout.zero, "never"),
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_async_tensor_parallel": layout.overlap_tp and layout.tp > 1,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "parallelism.expert_tensor_parallel_degree": (
            layout.effective_expert_tp
            if layout.ep > 1 and layout.effective_expert_tp in {1, layout.tp}
            else 1
        ),
    }
    if layout.cp > 1:
        rotate = _ROTATE.get(layout.cp_kind, "alltoall")
        keys["parallelism.context_parallel_rotate_method"] = rotate
    if keys["parallelism.enable_async_tensor_parallel"]:
        keys |= {"compile.enable": True, "compile.components": ["model", "loss"]}
    return keys


def _write_numbers(layout: Layout) -> dict[str, Any]:
    states = (layout.master_precision, layout.gradient_precision, layout.moment_precision)
    half = layout.precision != "fp32"
    keys: dict[str, Any] = {
        "training.dtype": "bfloat16" if half and states == ("none", "bf16", "bf16") else "float32",
        "training.mixed_precision_param": "bfloat16" if half else "float32",
        "training.enable_cpu_offload": set(layout.offload) >= set(HOST_STATES),
        "optimizer.name": "AdamW",
    }
    converter = _CONVERTERS.get(layout.precision)
    if converter is not None:
        keys["model.converters"] = [converter]
    if layout.precision.startswith("fp8-") and converter is not None:
        keys["quantize.linear.float8.recipe_name"] = layout.precision.removeprefix("fp8-")
    return keys


def _write_recompute(layout: Layout) -> dict[str, Any]:
    keys: dict[str, Any] = {"activation_checkpoint.mode": layout.recompute}
    if layout.recompute == "selective":
        keys["activation_checkpoint.selective_ac_option"] = "op"
    return keys


def read_parallelism(settings: FrameworkConfig, gpus: int | None, layers: int | None) -> Layout:
    """Return the layout; `layers` is the number of layers of the model, where it is known."""
    pipeline_ = pipeline.read_pipeline(settings, layers)
    fields = _read_degrees(settings, gpus, pipeline_["pp"]) | pipeline_
    fields |= pipeline.read_batch(settings, fields["pp"], fields["dp"])
    fields |= _read_numbers(settings)
    chunks = fields["pp"] * fields.get("virtual_stages", 1)
    fields |= _read_recompute(settings, layers, chunks)
    folded = settings.flag("parallelism.pipeline_parallel_expert_parallel_overlap", True)
    fields["overlap_ep"] = folded and fields["schedule"] == "dualpipe-v" and fields["ep"] > 1
    settings.raise_problems()
    return read_layout(fields, _ORIGIN)


_ORIGIN = {
    "ep": "parallelism.expert_parallel_degree",
    "global_batch": "training.global_batch_size",
    "virtual_stages": "parallelism.pipeline_parallel_schedule",
    "stage_layers": "parallelism.module_fqns_per_model_part",
}


def _read_degrees(settings: FrameworkConfig, gpus: int | None, pp: int) -> dict[str, Any]:
    tp = settings.integer("parallelism.tensor_parallel_degree", 1)
    cp = settings.integer("parallelism.context_parallel_degree", 1)
    ep = settings.integer("parallelism.expert_parallel_degree", 1)
    expert_tp = settings.integer("parallelism.expert_tensor_parallel_degree", 1) if ep > 1 else tp
    replicas = settings.integer("parallelism.data_parallel_replicate_degree", 1)
    shard = _shard(settings, gpus, replicas * tp * cp * pp, expert_tp * ep, tp * cp)
    words = {"default": 3 if pp == 1 else 2, "always": 3, "never": 2}
    stage = settings.choice("parallelism.fsdp_reshard_after_forward", words, words["default"])
    rotate = {word: kind for kind, word in _ROTATE.items()}
    slow = settings.flag("parallelism.enable_async_tensor_parallel")
    # A degree that is left to the launcher is meant to shard, however few GPUs are known.
    open_ended = settings.integer("parallelism.data_parallel_shard_degree", -1, least=-1) < 0
    kind = settings.choice("parallelism.context_parallel_rotate_method", rotate, "allgather")
    return {
        "tp": tp,
        # Tensor parallelism always splits the sequence; newer versions have a switch.
        "sequence_parallel": tp > 1 and settings.flag("parallelism.enable_sequence_parallel", True),
        "cp": cp,
        "cp_kind": kind if cp > 1 else "ring",
        "dp": replicas * shard,
        "zero": stage if shard * cp > 1 or (open_ended and gpus is None) else 0,
        "shard": shard * cp if replicas > 1 and shard * cp > 1 else None,
        "ep": ep,
        "expert_tp": None if expert_tp == tp else expert_tp,
        "overlap_tp": slow or settings.flag("compile.enable_async_tensor_parallel"),
    }


def _shard(
    settings: FrameworkConfig, gpus: int | None, others: int, experts: int, dense: int
) -> int:
    """Return the shard degree; -1 and absence stand for all the GPUs that are left."""
    key = "parallelism.data_parallel_shard_degree"
    shard = settings.integer(key, -1, least=-1)
    if shard == 0:
        settings.add_problem(key, "0 is neither a degree nor -1", "use -1")
        return 1
    if shard > 0:
        if gpus is not None and shard * others != gpus:
            settings.add_problem(key, f"the degrees make {shard * others} GPUs, not {gpus}",
                           "change a degree or the number of GPUs")  # fmt: skip
        return shard
    if gpus is None:
        least = experts // math.gcd(experts, dense)
        settings.notes.append(
            Problem("gpus", f"the number of GPUs is not given; the least that fits, a shard degree "
                    f"of {least}, is read", "give gpus")
        )  # fmt: skip
        return least
    if gpus % others or gpus < others:
        settings.add_problem(key, f"the other degrees, {others}, do not divide the {gpus} GPUs",
                       "change a degree or the number of GPUs")  # fmt: skip
        return 1
    return gpus // others


def _read_numbers(settings: FrameworkConfig) -> dict[str, Any]:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    stored = settings.choice("training.dtype", words, "fp32")
    precision = settings.choice("training.mixed_precision_param", words, "bf16")
    converters = settings.list_words("model.converters") or ()
    recipe = settings.text("quantize.linear.float8.recipe_name")
    for converter in converters:
        if "float8" in converter:
            precision = "fp8-rowwise" if str(recipe).startswith("rowwise") else "fp8-tensorwise"
        elif converter.endswith("mx"):
            precision = "mxfp8"
    name = settings.text("optimizer.name") or "AdamW"
    if name.lower() not in {"adam", "adamw"}:
        settings.add_note("optimizer.name", f"{name!r} cannot be held; adamw is read")
    pure = stored == "bf16" and precision != "fp32"
    return {
        "precision": precision,
        "master_precision": "none" if pure or precision == "fp32" else "fp32",
        "gradient_precision": "bf16" if pure else "fp32",
        "moment_precision": "bf16" if pure else "fp32",
        "offload": HOST_STATES if settings.flag("training.enable_cpu_offload") else (),
    }


def _read_recompute(settings: FrameworkConfig, layers: int | None, chunks: int) -> dict[str, Any]:
    modes = {word: word for word in ("none", "full", "selective", "memory_budget")}
    mode = settings.choice("activation_checkpoint.mode", modes, "selective")
    key = "activation_checkpoint.selective_ac_option"
    option = str(settings.raw(key) if settings.has(key) else "2").strip()
    if mode == "memory_budget":
        settings.add_note("activation_checkpoint.mode", "a budget cannot be held; none is read")
        return {"recompute": "none"}
    if mode != "selective":
        return {"recompute": mode}
    if option == "op":
        settings.add_note(key, "every second GEMM is recomputed too, which is not held")
        return {"recompute": "selective", "recompute_ops": _OP_POLICY}
    if not option.isdecimal() or len(option) > 9:
        settings.add_problem(key, f"{option!r} is neither a number of layers nor op", "use op")
        return {}
    every = int(option)
    if every <= 1:
        return {"recompute": "full"}
    if layers is None or layers % chunks:
        settings.add_note(
            key, f"one layer in {every} is recomputed; without the model all are read"
        )
        return {"recompute": "full"}
    return {"recompute": "full", "recompute_layers": layers // chunks // every}


def list_unsupported(layout: Layout) -> tuple[Problem, ...]:
    """List what torchtitan would refuse although its keys can say it."""
    shard = layout.shard_degree if layout.zero else layout.cp
    if layout.ep > 1 and shard * layout.tp % (layout.effective_expert_tp * layout.ep):
        return (
            Problem("layout.ep", f"{layout.ep} cannot be said in torchtitan TOML: experts spread "
                    "inside one sharded replica, which is too small", "use a larger shard"),
        )  # fmt: skip
    return ()


REASONS: Reasons = {
    "sequence_parallel": (
        "tensor parallelism always splits the sequence", "set sequence_parallel"),
    "cp_kind": ("keys and values are gathered, or sent round a ring", "use ring or allgather"),
    "schedule": (
        "GPipe, 1F1B, interleaved 1F1B (two chunks or more), ZB-V and DualPipeV are there",
        "use one of these"),
    "virtual_stages": (
        "other numbers of chunks than two are written as lists of modules, which need the model",
        "give the model, or stage_layers"),
    "stage_layers": ("the split is written out where it is not even", ""),
    "shard": ("sharding always covers context parallelism", "use a multiple of cp"),
    "zero": (
        "optimizer states are sharded together with gradients, and over context parallelism too",
        "use zero=2 or 3"),
    "expert_tp": ("experts are cut by 1 or by tp, and by tp without expert parallelism", ""),
    "recompute_ops": (
        "one policy is there: all but attention and every second GEMM",
        "use layernorm and mlp_act"),
    "recompute_layers": ("full recompute covers every layer", "leave it out"),
    "precision": ("bf16, fp32, float8 (tensorwise, rowwise) and mxfp8 are there", ""),
    "optimizer": ("Adam and AdamW are there", "use adamw"),
    "master_precision": ("states are all fp32, or all bf16 without a copy", ""),
    "gradient_precision": ("states are all fp32, or all bf16 without a copy", ""),
    "moment_precision": ("states are all fp32, or all bf16 without a copy", ""),
    "global_batch": (
        "the pipeline cuts a local batch, which has to be given", "set global_batch"),
    "overlap_gradients": ("it cannot be switched off", ""),
    "overlap_parameters": ("it cannot be switched off", ""),
    "overlap_pp": ("it cannot be switched off", ""),
    "overlap_ep": ("only DualPipeV hides the experts' all-to-all", "use schedule=dualpipe-v"),
    "offload": (
        "parameters, gradients and optimizer go to the host together", "name all three, or none"),
    "offload_layers": ("activations stay on the device", "leave it out"),
    "order": ("ranks are ordered tp-cp-ep-dp-pp", "use that order"),
    "model": (
        "architectures are flavors in torchtitan's code, and none has this shape",
        "add a flavor to torchtitan"),
    "*": ("the flavor fixes it", ""),
}  # fmt: skip
"""Why torchtitan cannot say a field, and what to do."""
