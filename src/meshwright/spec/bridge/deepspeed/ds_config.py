"""DeepSpeed's JSON configuration.

The keys are in `keys`. Pipelines, checkpointing of activations and the architecture are the user's
code there. The number of processes is the launcher's affair; the three batch sizes together tell
it.
"""

import json
from collections.abc import Mapping
from typing import Any

from meshwright.errors import Problem
from meshwright.spec.bridge.deepspeed.ds_config_keys import (
    FILLED_FROM_MODEL,
    IGNORED,
    KEYS,
    REASONS,
    TRAINER_ARGUMENTS,
)
from meshwright.spec.bridge.export_report import (
    convert_tuples_to_lists,
    fill_global_batch,
    list_lost_fields,
    read_layout,
)
from meshwright.spec.bridge.format_detection import ExpectedFormat, read_table, require_known_keys
from meshwright.spec.bridge.framework_bridge import ExportedConfig, ImportedConfig
from meshwright.spec.bridge.framework_config import (
    FrameworkConfig,
    classify_unread,
    flatten,
    unflatten,
)
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

TITLE = "DeepSpeed JSON"
EXPECTED_FORMAT = ExpectedFormat(
    "deepspeed", "DeepSpeed settings", "give DeepSpeed's configuration in JSON"
)

_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "sgd": "SGD"}
_OPTIMIZERS_BACK = {
    **{word.lower(): name for name, word in _OPTIMIZERS.items()},
    "adam": "adamw",  # adam_w_mode is on unless the parameters say otherwise
}
_HALF = {"fp32": "fp32", "fp16": "fp16"}
_TYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
}  # fmt: skip


def export_config(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> ExportedConfig:
    """Return the JSON file; what needs code is listed."""
    layout = fill_global_batch(layout, global_batch)
    data = convert_tuples_to_lists(unflatten(_write(layout)))
    text = json.dumps(data, indent=2) + "\n"
    back = import_config(text, gpus=layout.gpus)
    unexpressed = list_lost_fields(
        back, layout, model, sequence_length, title=TITLE, reasons=REASONS
    )
    said = {problem.where for problem in unexpressed}
    unexpressed += tuple(p for p in _needs_code(layout) if p.where not in said)
    return ExportedConfig(text=text, data=data, unexpressed=unexpressed)


def _write(layout: Layout) -> dict[str, Any]:
    batch = layout.global_batch
    zero = _stage(layout)
    half = _HALF.get(layout.precision, "bf16")
    keys: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": layout.count_microbatches(batch)
        if batch is not None
        else None,
        "zero_optimization.stage": zero,
        "zero_optimization.overlap_comm": layout.overlap_gradients if zero else None,
        "zero_optimization.mics_shard_size": layout.shard if zero == 3 else None,
        "zero_optimization.stage3_prefetch_bucket_size": (
            0 if zero == 3 and not layout.overlap_parameters else None
        ),
        "bf16.enabled": True if half == "bf16" else None,
        "fp16.enabled": True if half == "fp16" else None,
        "optimizer.type": _OPTIMIZERS[layout.optimizer],
        # ZeRO takes optimizers that are not DeepSpeed's own only when told to.
        "zero_allow_untested_optimizer": True if zero and layout.optimizer == "sgd" else None,
        **_write_states(layout, zero, half),
        **_write_parallel(layout),
    }
    if "optimizer" in layout.offload and zero:
        keys["zero_optimization.offload_optimizer.device"] = "cpu"
    if "parameters" in layout.offload and zero == 3:
        keys["zero_optimization.offload_param.device"] = "cpu"
    if "activations" in layout.offload and layout.recompute == "full":
        keys["activation_checkpointing.cpu_checkpointing"] = True
    return {key: value for key, value in keys.items() if value is not None}


def _stage(layout: Layout) -> int:
    """Return the ZeRO stage; a pipeline works with the optimizer's states only."""
    return min(layout.zero, 1) if layout.pp > 1 else layout.zero


def _write_states(layout: Layout, zero: int, half: str) -> dict[str, Any]:
    if not zero or half == "fp32":
        return {}
    master = layout.master_precision == half
    keys: dict[str, Any] = {}
    if master:
        keys[f"{half}.{half}_master_weights_and_grads"] = True
    if master and half == "bf16" and layout.moment_precision == "bf16":
        keys["bf16.bf16_optimizer_states"] = True
    if layout.gradient_precision in {"fp32", half}:
        keys["data_types.grad_accum_dtype"] = layout.gradient_precision
    return keys


def _write_parallel(layout: Layout) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if layout.tp > 1:
        keys["tensor_parallel.autotp_size"] = layout.tp
        keys["tensor_parallel.tp_overlap_comm"] = layout.overlap_tp
    if layout.cp > 1:
        keys |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    if layout.ep > 1:
        keys |= {
            "expert_parallel.enabled": True,
            "expert_parallel.autoep_size": layout.ep,
            "expert_parallel.expert_tensor_parallel_size": layout.effective_expert_tp,
        }
    if layout.pp > 1:
        keys["pipeline.stages"] = layout.pp
        if layout.recompute == "full":
            keys["pipeline.activation_checkpoint_interval"] = 1
    return keys


def _needs_code(layout: Layout) -> tuple[Problem, ...]:
    """List what the file says but only the user's code brings about, and what is refused."""
    found = []
    if layout.pp > 1:
        found.append(
            Problem("layout.pp", f"{layout.pp} cannot be said in {TITLE} alone: the number of "
                    "stages is an argument of PipelineModule", f"pass num_stages={layout.pp}")
        )  # fmt: skip
    if layout.recompute == "full" and layout.pp == 1:
        found.append(
            Problem("layout.recompute", f"'full' cannot be said in {TITLE} alone: the model's code "
                    "switches checkpointing on", "enable checkpointing in the model")
        )  # fmt: skip
    alone = (
        layout.tp > 1 or layout.cp > 1 or layout.effective_expert_tp > 1 or layout.shard is not None
    )
    if layout.ep > 1 and layout.zero == 3 and alone:
        found.append(
            Problem("layout.ep", f"{layout.ep} cannot be said in {TITLE} together with zero=3 and "
                    "tensor, sequence or hybrid parallelism: the engine refuses it", "use zero=2")
        )  # fmt: skip
    return tuple(found)


def import_config(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> ImportedConfig:
    """Read a configuration; it holds no model, so `name` and `vocab` have no use."""
    del name, vocab
    flat = flatten(read_table(given, ".json", "config", EXPECTED_FORMAT))
    every = {key: value for key, value in flat.items() if value is not None}
    # Hugging Face's Trainer fills in "auto" when it starts: here that is a key left out.
    open_keys = frozenset(key for key, value in every.items() if value == "auto")
    said = {key: None if key in open_keys else value for key, value in every.items()}
    settings = FrameworkConfig(said, KEYS)
    found = classify_unread(every, settings, IGNORED, "DeepSpeed key", cutoff=0.82)
    read = sum(key in settings.known for key in every)
    require_known_keys(given, read + len(found.ignored), found, EXPECTED_FORMAT)
    _note_open(settings, open_keys)
    layout = _read(settings, gpus, open_keys)
    return ImportedConfig(layout=layout, ignored=found.ignored, unknown=tuple(settings.notes))


def _note_open(settings: FrameworkConfig, open_keys: frozenset[str]) -> None:
    """Say who decides what the file leaves open."""
    for key in sorted(open_keys & settings.known - FILLED_FROM_MODEL):
        argument = TRAINER_ARGUMENTS.get(key)
        who = f"Trainer's {argument}" if argument else "the program that reads the file"
        fix = f"write here what is passed as {argument}" if argument else "write the value here"
        settings.add_note(key, f"auto says nothing here, {who} will", fix)


def _read(settings: FrameworkConfig, gpus: int | None, open_keys: frozenset[str]) -> Layout:
    zero = _read_stage(settings)
    fields: dict[str, Any] = _read_degrees(settings)
    fields |= _read_batch(settings, gpus, fields["tp"] * fields["cp"] * fields["pp"], open_keys)
    fields |= _read_numbers(settings, zero, open_keys)
    fields |= _read_steps(settings, zero, fields["pp"])
    shard = settings.integer("zero_optimization.mics_shard_size", -1, least=-1)
    if shard > 0 and zero == 3:
        fields["shard"] = shard
    if settings.integer("zero_optimization.zero_hpz_partition_size", 1, least=0) > 1:
        settings.add_note("zero_optimization.zero_hpz_partition_size", "a second copy of the "
                      "parameters inside a node cannot be held")  # fmt: skip
    for part in ("weights", "gradients"):
        if settings.flag(f"zero_optimization.zero_quantized_{part}"):
            settings.add_note(
                f"zero_optimization.zero_quantized_{part}",
                f"{part} that are sent in fewer bits cannot be held; they are read as whole",
            )
    settings.raise_problems()
    return read_layout(fields | {"zero": zero}, _ORIGIN)


_ORIGIN = {
    "global_batch": "train_batch_size",
    "shard": "zero_optimization.mics_shard_size",
    "ep": "expert_parallel.autoep_size",
}


def _read_stage(settings: FrameworkConfig) -> int:
    old = settings.raw("zero_optimization")
    if isinstance(old, bool):
        return int(old)  # the oldest form: true is stage 1
    stage = settings.integer("zero_optimization.stage", 0, least=0)
    if stage > 3:
        settings.add_problem(
            "zero_optimization.stage", f"{stage} is not one of 0, 1, 2, 3", "use 3"
        )
        return 0
    return stage


def _read_degrees(settings: FrameworkConfig) -> dict[str, Any]:
    tp = max(1, settings.integer("tensor_parallel.autotp_size", 1, least=0))
    cp = settings.integer("sequence_parallel_size", 1)
    spread = settings.flag("expert_parallel.enabled")
    ep = settings.integer("expert_parallel.autoep_size", 1) if spread else 1
    expert_tp = settings.integer("expert_parallel.expert_tensor_parallel_size", 1) if spread else tp
    return {
        "tp": tp,
        "cp": cp,
        "pp": settings.integer("pipeline.stages", 1),
        "cp_kind": "ulysses" if cp > 1 else "ring",
        "ep": ep,
        "expert_tp": None if expert_tp == tp else expert_tp,
    }


def _read_batch(
    settings: FrameworkConfig, gpus: int | None, others: int, open_keys: frozenset[str]
) -> dict[str, Any]:
    """Return the data-parallel degree and the batch, each from what is given of the other two."""
    batch = settings.optional_integer("train_batch_size")
    micro = settings.optional_integer("train_micro_batch_size_per_gpu")
    steps = settings.optional_integer("gradient_accumulation_steps")
    dp = settings.optional_integer("data_parallel_size")
    if dp is None and gpus is not None:
        dp = _from_gpus(settings, gpus, others)
    if dp is None and batch and micro and steps and batch % (micro * steps) == 0:
        dp = batch // (micro * steps)
    if dp is None:
        dp = 1
        settings.notes.append(
            Problem("gpus", "the number of GPUs is not given; dp=1 is read", "give gpus")
        )
    if batch is None and micro is not None and steps is not None:
        batch = micro * steps * dp
    if micro is None and batch is not None:
        # Steps that are left out are one; steps that are left to the Trainer are not known.
        known = steps or (1 if "gradient_accumulation_steps" not in open_keys else None)
        micro = max(1, batch // (dp * known)) if known is not None else None
    return {"dp": dp, "microbatch": micro or 1, "global_batch": batch}


def _from_gpus(settings: FrameworkConfig, gpus: int, others: int) -> int | None:
    if gpus < 1 or gpus % others:
        settings.add_problem(
            "tensor_parallel.autotp_size",
            f"the degrees, {others}, do not divide the {gpus} GPUs",
            "change a degree or the number of GPUs",
        )
        return 1
    return gpus // others


def _read_numbers(
    settings: FrameworkConfig, zero: int, open_keys: frozenset[str]
) -> dict[str, Any]:
    half = _read_half(settings, open_keys)
    low = half != "fp32" and settings.flag(f"{half}.{half}_master_weights_and_grads") and zero > 0
    moments = half == "bf16" and low and settings.flag("bf16.bf16_optimizer_states")
    name = (settings.text("optimizer.type") or "AdamW").lower()
    if name not in _OPTIMIZERS_BACK:
        settings.add_note("optimizer.type", f"{name!r} cannot be held; adamw is read")
    return {
        "precision": half,
        "master_precision": "none" if half == "fp32" else half if low else "fp32",
        # Gradients are summed in the format of the weights unless told otherwise.
        "gradient_precision": settings.choice("data_types.grad_accum_dtype", _TYPES, half),
        "moment_precision": "bf16" if moments else "fp32",
        "optimizer": _OPTIMIZERS_BACK.get(name, "adamw"),
    }


def _read_half(settings: FrameworkConfig, open_keys: frozenset[str]) -> str:
    """Return the format of the products; one that is left open is not taken for off."""
    bf16 = settings.flag("bf16.enabled") or settings.flag("bfloat16.enabled")
    fp16 = settings.flag("fp16.enabled")
    if bf16 and fp16:
        settings.add_problem("fp16.enabled", "cannot be on together with bf16", "switch one off")
    if bf16 or (not fp16 and open_keys & {"bf16.enabled", "bfloat16.enabled"}):
        return "bf16"  # where it is open, what a layout has by itself
    return "fp16" if fp16 or "fp16.enabled" in open_keys else "fp32"


def _read_steps(settings: FrameworkConfig, zero: int, pp: int) -> dict[str, Any]:
    prefetch = settings.raw("zero_optimization.stage3_prefetch_bucket_size")
    if prefetch is None:
        prefetch = settings.raw("zero_optimization.prefetch_bucket_size")
    every = settings.integer("pipeline.activation_checkpoint_interval", 0, least=0)
    offload = []
    if zero and _is_offloaded(settings, "offload_optimizer", "cpu_offload"):
        offload += ["gradients", "optimizer"]  # gradients follow the optimizer to the host
        part = settings.number("zero_optimization.offload_optimizer.ratio", 1.0)
        if part != 1.0:
            settings.add_note(
                "zero_optimization.offload_optimizer.ratio",
                f"{part} of the optimizer on the host is read as all of it",
            )
    if zero == 3 and _is_offloaded(settings, "offload_param", "cpu_offload_param"):
        offload.append("parameters")
    hosted = settings.flag("activation_checkpointing.cpu_checkpointing")
    if hosted:
        offload.append("activations")
    if every > 1:
        settings.add_note("pipeline.activation_checkpoint_interval", f"units of {every} layers are "
                      "read as every layer by itself")  # fmt: skip
    return {
        "overlap_gradients": bool(zero)
        and settings.flag("zero_optimization.overlap_comm", zero == 3),
        "overlap_parameters": zero in {0, 3} and prefetch != 0,
        "overlap_tp": settings.flag("tensor_parallel.tp_overlap_comm"),
        "overlap_pp": pp == 1,
        "recompute": "full" if (every and pp > 1) or hosted else "none",
        "offload": tuple(offload),
    }


def _is_offloaded(settings: FrameworkConfig, section: str, old: str) -> bool:
    """Tell whether a state is kept outside the GPU, in today's words or by the old switch."""
    key = f"zero_optimization.{section}.device"
    device = settings.raw(key)
    if device == "nvme":
        settings.add_note(key, "a disk cannot be held; the host's memory is read")
    return device in {"cpu", "nvme"} or settings.flag(f"zero_optimization.{old}")
