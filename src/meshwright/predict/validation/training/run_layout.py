"""The layout of a published run, and what had to be assumed where its row is silent."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import InputError
from meshwright.predict.validation.training.framework_defaults import apply_framework_defaults
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec.layout import Layout, RecomputeOp
from meshwright.spec.model import LatentAttentionSpec, Model, MoESpec
from meshwright.spec.serialization import decode

_PRECISIONS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8-tensorwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
_SCHEDULES = {
    "interleaved-1f1b": "interleaved",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "afab": "gpipe",
    "zb-1p": "zb-h1",
    "zero-bubble": "zb-h1",
    "zb-2p": "zb-h2",
    "zbb": "zb-h1",
    "zbv": "zb-v",
    "zbv-formatted": "zb-v",
    "v-half": "zb-v",
    "v-min": "zb-v",
    "dualpipe": "dualpipe",
    "dualpipev": "dualpipe-v",
}
_OPS: dict[str, RecomputeOp] = {
    "core_attn": "core_attn",
    "layernorm": "layernorm",
    "norm": "layernorm",
    "mlp": "mlp",
    "act": "mlp_act",
    "moe": "moe",
    "moe_act": "moe_act",
    "mla_up_proj": "mla_up_proj",
    "shared_expert": "shared_experts",
    "shared_experts": "shared_experts",
}


_NEAR = 0.02
"""How far a batch may be rounded so that it divides."""


class PublishedLayout(NamedTuple):
    """A layout read from a row."""

    layout: Layout
    assumed: tuple[str, ...]
    """What the row does not say and was filled in."""
    recompute_known: bool


def read_layout(row: Mapping[str, Any], model: Model) -> PublishedLayout:
    """Return the layout of a row; what it leaves open is filled in and named."""
    given, assumed, layers = row["layout"], list[str](), model.layers
    tp, pp, cp = (given.get(name) or 1 for name in ("tp", "pp", "cp"))
    if given.get("tp") is None or given.get("pp") is None:
        raise UnusableRowError("the row does not say how the model is split")
    gpus, batch = row["gpus"], row.get("global_batch")
    if gpus % (tp * pp * cp):
        raise UnusableRowError(f"tp × pp × cp = {tp * pp * cp} does not divide {gpus} GPUs")
    if batch is None:
        raise UnusableRowError("the row does not say the global batch")
    dp = gpus // (tp * pp * cp)
    microbatch = row.get("micro_batch")
    if microbatch is None:
        microbatch = 1
    batch = _dividing(batch, dp, assumed)
    if batch // dp % microbatch:
        microbatch = 1
        assumed.append("microbatch 1: the printed one does not divide the batch")
    schedule, chunks = _schedule(given, pp, layers)
    zero = given.get("zero_norm")
    if zero is None:
        zero = 1 if pp * tp > 1 else 3
        assumed.append(f"zero {zero}")
    precision = row.get("precision_class")
    if precision is None:
        raise UnusableRowError("the row does not say the precision")
    data: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "sequence_parallel": bool(given.get("sp")) and tp > 1,
        "virtual_stages": chunks,
        "schedule": schedule,
        "ep": given.get("ep") or 1,
        "expert_tp": given.get("etp") or (1 if (given.get("ep") or 1) > 1 else None),
        "zero": zero,
        "shard": _shard(given, dp * cp),
        "precision": _PRECISIONS[precision],
        "microbatch": microbatch,
        "global_batch": batch,
        "stage_layers": _uneven(layers, pp * chunks),
        "overlap_ep": bool(given.get("ep_overlap")),
        "overlap_tp": bool(given.get("tp_overlap")),
        "offload": ["activations"] if given.get("act_cpu_offload") else [],
        **_recompute(row, model),
    }
    try:
        layout = decode(Layout, {name: value for name, value in data.items() if value is not None})
    except InputError as error:
        raise UnusableRowError(f"the layout contradicts itself: {error}") from None
    layout = apply_framework_defaults(row, layout, model)
    if row.get("micro_batch") is None:
        assumed.append(f"microbatch {layout.microbatch}")
    if layout.virtual_stages > 1 and not given.get("vpp"):
        assumed.append(f"{layout.virtual_stages} chunks per rank")
    return PublishedLayout(layout, tuple(assumed), given.get("recompute") is not None)


def _dividing(batch: int, replicas: int, assumed: list[str]) -> int:
    """Return the batch, or the nearest one that divides over the replicas."""
    near = round(batch / replicas) * replicas
    if abs(near - batch) > _NEAR * batch:
        raise UnusableRowError(f"{batch} sequences do not divide over {replicas} replicas")
    if near != batch:
        assumed.append(f"a batch of {near}, which divides over the replicas")
    return near


def _schedule(given: Mapping[str, Any], pp: int, layers: int) -> tuple[str, int]:
    if pp == 1:
        return "1f1b", 1
    name = _SCHEDULES.get(str(given.get("schedule") or "1f1b").lower(), "1f1b")
    chunks = given.get("vpp") or (2 if name == "interleaved" and 2 * pp <= layers else 1)
    if chunks > 1 and name == "1f1b":
        name = "interleaved"
    if name in {"zb-v", "dualpipe-v"}:
        return name, 2
    if name != "interleaved" or chunks * pp > layers:
        return ("1f1b" if name == "interleaved" else name), 1
    return (name, chunks) if chunks > 1 else ("1f1b", 1)


def _uneven(layers: int, chunks: int) -> list[int] | None:
    """Split layers that do not divide: what is missing is taken from the chunk with the head.

    Recipes do it so, because the head and the layers that predict further tokens weigh as much.
    Where the last chunk would be left with none, the chunks at both ends give one each in turn.
    """
    if layers % chunks == 0:
        return None
    each = -(-layers // chunks)
    sizes = [each] * chunks
    missing = each * chunks - layers
    if missing < each:
        sizes[-1] -= missing
        return sizes
    for turn in range(missing):
        sizes[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    return sizes


def _shard(given: Mapping[str, Any], spread: int) -> int | None:
    text = str(given.get("zero_stage_or_distopt") or "")
    found = re.search(r"within (\d+)|FSDP=(\d+)", text)
    group = given.get("fsdp_group")
    size = int(next(filter(None, found.groups()))) if found else int(group) if group else None
    return size if size is not None and size < spread and spread % size == 0 else None


def _recompute(row: Mapping[str, Any], model: Model) -> dict[str, Any]:
    given = row["layout"]
    kind = given.get("recompute") or "none"
    if kind != "selective":
        return {"recompute": kind}
    if given.get("recompute_detail") is None and row.get("precision_class") != "fp16":
        # Flash kernels left little to gain from attention's core; recipes since drop these.
        return {
            "recompute": "selective",
            "recompute_ops": ["layernorm", *list_cheap_recompute_ops(model)],
        }
    words = re.split(r"[,+\s]+", str(given.get("recompute_detail") or "core_attn"))
    ops = [_OPS[word] for word in words if word in _OPS]
    return {"recompute": "selective", "recompute_ops": ops or ["core_attn"]}


def list_cheap_recompute_ops(model: Model) -> list[RecomputeOp]:
    """What else is large and cheap to compute again in a model's layers."""
    found: set[RecomputeOp] = set()
    for block in model.blocks:
        found.add("moe_act" if isinstance(block.mlp, MoESpec) else "mlp_act")
        if isinstance(block.mixer, LatentAttentionSpec):
            found.add("mla_up_proj")
    return sorted(found)
