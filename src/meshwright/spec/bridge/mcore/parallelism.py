"""Parallel degrees, batch sizes, sharding and rank order in Megatron-Core's settings."""

import math
from typing import Any

from meshwright.errors import Problem
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.layout.layout import Layout

SETTINGS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "use_torch_fsdp2",
    "torch_fsdp2_reshard_after_forward",
    "ckpt_format",
    "use_tp_pp_dp_mapping",
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
)

# megatron/core/transformer/transformer_config.py, `cp_comm_type`.
_CONTEXT = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a", "ring+ulysses": "a2a+p2p"}
_CONTEXT_BACK = {word: kind for kind, word in _CONTEXT.items()}

# Megatron-FSDP's strategies as ZeRO stages; `no_shard` and `optim` are not exported, because the
# distributed optimizer says the same without FSDP.
_STRATEGY = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_STRATEGY_BACK = {stage: word for word, stage in _STRATEGY.items()}

# megatron/training/initialize.py: the two orders that Megatron-LM can start with.
_ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


GPUS_UNKNOWN = Problem(
    "gpus", "the number of GPUs is not given; the least that fits, dp={dp}, is read", "give gpus"
)


def get_zero_stage(layout: Layout) -> int:
    """Return the ZeRO stage that Megatron can run for this layout."""
    if layout.zero >= 2 and layout.optimizer not in {"adamw", "sgd"}:
        return 1  # Megatron-FSDP refuses the other optimizers
    return layout.zero


def write_parallelism(layout: Layout) -> dict[str, Any]:
    """Return the settings of everything but the pipeline."""
    zero = get_zero_stage(layout)
    instances = _instances(layout, zero)
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "context_parallel_size": layout.cp,
        "cp_comm_type": _CONTEXT[layout.cp_kind],
        "hierarchical_context_parallel_sizes": _hierarchy(layout),
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "use_distributed_optimizer": zero > 0,
        "num_distributed_optimizer_instances": instances,
        "use_megatron_fsdp": zero > 1,
        "data_parallel_sharding_strategy": _STRATEGY_BACK[zero] if zero > 1 else None,
        # Megatron-FSDP refuses to start with another checkpoint format.
        "ckpt_format": "fsdp_dtensor" if zero > 1 else None,
        "use_tp_pp_dp_mapping": layout.order == _ORDERS[True],
        "micro_batch_size": layout.microbatch,
        "global_batch_size": layout.global_batch,
    }


def _instances(layout: Layout, zero: int) -> int | None:
    """Return over how many groups each optimizer state is repeated, None where it is one."""
    if layout.shard is None or zero == 0:
        return None
    instances = layout.dp * layout.cp // layout.shard
    # Megatron cuts the experts' data-parallel group by the same number.
    return instances if layout.expert_dp % instances == 0 else None


def _hierarchy(layout: Layout) -> list[int] | None:
    """Return the sizes of the all-to-all and the ring part, which the layout does not say."""
    if layout.cp_kind != "ring+ulysses":
        return None
    inner = 2 if layout.cp % 2 == 0 else 1
    return [inner, layout.cp // inner]


def read_parallelism(settings: FrameworkConfig, gpus: int | None, pp: int) -> dict[str, Any]:
    """Return the layout fields of everything but the pipeline."""
    tp = settings.integer("tensor_model_parallel_size", 1)
    cp = settings.integer("context_parallel_size", 1)
    ep = settings.integer("expert_model_parallel_size", 1)
    expert_tp = settings.optional_integer("expert_tensor_parallel_size")
    zero = _zero(settings)
    key = "num_distributed_optimizer_instances"
    instances = settings.optional_integer(key)
    if gpus is None:
        dp = math.lcm(_missing(tp * cp, (expert_tp or tp) * ep), _missing(cp, instances or 1))
        settings.notes.append(GPUS_UNKNOWN._replace(what=GPUS_UNKNOWN.what.format(dp=dp)))
    else:
        dp = _data_parallel(settings, gpus, tp * cp * pp)
    fields: dict[str, Any] = {
        "tp": tp,
        # Megatron turns it off by itself without tensor parallelism.
        "sequence_parallel": settings.flag("sequence_parallel") and tp > 1,
        "cp": cp,
        "cp_kind": _context_kind(settings),
        "dp": dp,
        "ep": ep,
        "expert_tp": expert_tp,
        "zero": zero,
        "order": _ORDERS[settings.flag("use_tp_pp_dp_mapping")],
        "microbatch": settings.integer("micro_batch_size", 1),
        "global_batch": settings.optional_integer("global_batch_size"),
    }
    if instances is not None and zero > 0:
        if dp * cp % instances:
            settings.add_problem(key, f"{instances} does not divide dp × cp = {dp * cp}",
                           f"use a divisor of {dp * cp}")  # fmt: skip
        else:
            fields["shard"] = dp * cp // instances
    for key in ("rampup_batch_size", "step_batch_size_schedule"):
        if settings.has(key):
            settings.add_note(
                key, "a growing batch cannot be held by a layout", "the final size is"
            )
    return fields


def _missing(have: int, need: int) -> int:
    """Return the least factor that makes `have` a multiple of `need`."""
    return need // math.gcd(have, need)


def _data_parallel(settings: FrameworkConfig, gpus: int, model_gpus: int) -> int:
    if gpus % model_gpus or gpus < 1:
        settings.add_problem(
            "tensor_model_parallel_size",
            f"tp × cp × pp = {model_gpus} does not divide the {gpus} GPUs",
            f"say that there are {-(-gpus // model_gpus) * model_gpus} GPUs, or change a degree",
        )
        return 1
    return gpus // model_gpus


def _context_kind(settings: FrameworkConfig) -> str:
    words = settings.list_words("cp_comm_type")
    if not words:
        return "ring"
    if len(set(words)) > 1:
        settings.add_note(
            "cp_comm_type", f"differs from layer to layer; {words[0]} is read for all"
        )
    unknown = [word for word in words if word not in _CONTEXT_BACK]
    if unknown:
        settings.add_problem(
            "cp_comm_type", f"{unknown[0]!r} is not one of {', '.join(_CONTEXT_BACK)}", "use p2p"
        )
        return "ring"
    return _CONTEXT_BACK[words[0]]


def _zero(settings: FrameworkConfig) -> int:
    if settings.flag("use_torch_fsdp2"):
        return 3 if settings.flag("torch_fsdp2_reshard_after_forward", True) else 2
    if settings.flag("use_megatron_fsdp"):
        return settings.choice("data_parallel_sharding_strategy", _STRATEGY, 3)
    return 1 if settings.flag("use_distributed_optimizer") else 0
