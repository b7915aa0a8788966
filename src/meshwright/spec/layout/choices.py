"""The words a `Layout` is written in: its axes and the choices of its fields."""

from itertools import permutations
from typing import Literal, get_args

Precision = Literal[
    "fp32",
    "bf16",
    "fp16",
    "fp8-tensorwise",
    "fp8-rowwise",
    "fp8-blockwise",
    "mxfp8",
    "nvfp4",
]
StatePrecision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "none"]
ScheduleKind = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"
]
ContextParallelKind = Literal["ring", "allgather", "ulysses", "ring+ulysses"]
Recompute = Literal["none", "selective", "full"]
RecomputeOp = Literal[
    "core_attn", "layernorm", "mlp", "mlp_act", "mla_up_proj", "moe", "moe_act", "shared_experts"
]
Optimizer = Literal["adamw", "muon", "lion", "sgd"]
Offload = Literal["activations", "gradients", "optimizer", "parameters"]

AXES = ("tp", "cp", "ep", "dp", "pp")

V_SCHEDULES = frozenset({"zb-v", "dualpipe-v"})
"""Schedules that run the model down the ranks and back up: exactly two chunks per rank."""

MULTI_CHUNK_SCHEDULES = V_SCHEDULES | {"interleaved"}
"""Schedules that run more than one chunk per rank."""

AXIS_ORDERS = frozenset("-".join(order) for order in permutations(AXES))
"""Every way to order the axes."""


def _choices(kind: object) -> frozenset[str]:
    return frozenset(get_args(kind))


CHOICES: dict[str, frozenset[str]] = {
    "precision": _choices(Precision),
    "schedule": _choices(ScheduleKind),
    "recompute": _choices(Recompute),
    "master_precision": _choices(StatePrecision),
    "gradient_precision": _choices(StatePrecision) - {"none"},
    "moment_precision": _choices(StatePrecision) - {"none"},
    "optimizer": _choices(Optimizer),
    "cp_kind": _choices(ContextParallelKind),
}
"""The texts each choice field takes."""

RECOMPUTE_OPS = _choices(RecomputeOp)
OFFLOADS = _choices(Offload)

MAX_VALUES = {
    "tp": 10**4,
    "cp": 10**4,
    "pp": 10**4,
    "dp": 10**7,
    "ep": 10**5,
    "microbatch": 10**6,
    "virtual_stages": 10**3,
    "shard": 10**7,
    "expert_tp": 10**4,
    "global_batch": 10**9,
}
"""The largest value of each degree: beyond any machine, and small enough for exact arithmetic."""

BOOLEAN_FIELDS = (
    "sequence_parallel",
    "overlap_gradients",
    "overlap_parameters",
    "overlap_tp",
    "overlap_pp",
    "overlap_ep",
)
"""The fields that are on or off."""
