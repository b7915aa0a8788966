"""What a rank that trains has to send, and what a rank that serves has to fill."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.policy.resharding.weight_transfer import FP8_ROWWISE, RankShards, TensorSlice
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.serve.model.quantization import Fp8LinearMethod
from meshwright.run.train.optimizer.optimizer import Optimizer
from meshwright.run.train.run_folder.state_tensors import make_sharded_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """Memory of a served parameter."""

    sharded_tensor: ShardedTensor
    formats: tuple[str, ...]
    """That of its numbers; before it, where that is fp8, the one they are rounded to first."""
    scale: Tensor | None = None
    """Scales of its rows, where it has some."""


class TensorView(NamedTuple):
    """A view of a tensor, and the box of the whole that it shows."""

    view: Tensor
    box: TensorBox


def collect_rank_weights(sharded_model: ShardedModel) -> dict[str, ShardedTensor]:
    """Return the weights that a rank computes with: all of those that it holds.

    With ZeRO 3 they come and go; `collect_sharded_weights` has what stays.
    """
    return {
        name: ShardedTensor.from_spec(value.detach(), sharded_model.shard_specs[name])
        for name, value in sharded_model.decoder.named_parameters()
    }


def collect_sharded_weights(sync: Sync) -> dict[str, ShardedTensor]:
    """Return the parts of weights that a rank updates."""
    lies, found = sync.shard_ranges(), {}
    for name, value in sync.named_parameters():
        holding, start, stop = lies[name]
        if (start, stop) == (0, math.prod(holding.shape)):
            found[name] = ShardedTensor.from_spec(value.detach().view(holding.shape), holding)
        else:
            found[name] = ShardedTensor.from_flat_range(
                value.detach().view(-1), holding, start, stop
            )
    return found


def collect_master_weights(sync: Sync, optimizer: Optimizer) -> dict[str, ShardedTensor]:
    """Return the most exact weights that a rank keeps: fp32 masters where there are any."""
    state, found = make_sharded_state(sync, optimizer), {}
    for key, value in state.items():
        for room in ("model.", "optimizer.master."):
            if key.startswith(room) and isinstance(value, ShardedTensor):
                # Masters stand behind the model's own in the state, and replace them.
                found[key.removeprefix(room)] = value
    return found


def collect_decoder_weights(decoder: Decoder) -> dict[str, ShardedTensor]:
    """Return the weights of a model in one piece."""
    return {
        name: ShardedTensor.unsharded(each.detach()) for name, each in decoder.named_parameters()
    }


def collect_weight_targets(
    decoder: Decoder, shard_specs: Mapping[str, ShardSpec] | None = None, *, base: str = "bf16"
) -> dict[str, WeightTarget]:
    """Return what a served model, or a rank's part of it, has to be filled.

    Numbers that are kept as fp8 are rounded to `base` first, as they are when a folder is read.
    """
    scales = {}
    for path, part in decoder.named_modules():
        if not isinstance(part, Linear) or part.linear_method is None:
            continue
        if not isinstance(part.linear_method, Fp8LinearMethod):
            what = f"its weights are kept as {part.recipe}"
            raise InputError([Problem(path, what, "serve with weights in fp8, or as they are")])
        scales[f"{path}.weight"] = part.linear_method.scale
    found = {}
    for name, value in decoder.named_parameters():
        tensor = value.detach()
        whole = (
            ShardSpec.unsharded(tuple(tensor.shape)) if shard_specs is None else shard_specs[name]
        )
        scale = scales.get(name)
        formats = (get_format_name(name, tensor),) if scale is None else (base, FP8_ROWWISE)
        found[name] = WeightTarget(ShardedTensor.from_spec(tensor, whole), formats, scale)
    return found


def describe_shards(
    tensors: Mapping[str, ShardedTensor] | Mapping[str, WeightTarget],
) -> dict[str, RankShards]:
    """Return what a rank has, without the numbers: what plans are made of."""
    found = {}
    for name, each in tensors.items():
        placed = each.sharded_tensor if isinstance(each, WeightTarget) else each
        own = (
            each.formats
            if isinstance(each, WeightTarget)
            else (get_format_name(name, placed.tensor),)
        )
        boxes = tuple(TensorBox(part.offsets, part.sizes) for part in placed.chunks)
        found[name] = RankShards(own, placed.global_shape, boxes)
    return found


def get_slice_view(placed: ShardedTensor, slice_: TensorSlice) -> TensorView:
    """Return the view of a rank's tensor that a slice reads or writes."""
    for part in placed.chunks:
        whole = TensorBox(part.offsets, part.sizes)
        if whole.contains(slice_.box):
            return TensorView(placed.view_chunk(part)[slice_.box.slice_in(whole)], slice_.box)
    raise ValueError(f"{slice_.tensor_name} has no {slice_.box} here: the plan is of other ranks")


def get_format_name(name: str, tensor: Tensor) -> str:
    """Name the format of a tensor."""
    if tensor.dtype not in FORMATS:
        what = f"is {tensor.dtype}"
        raise InputError([Problem(name, what, f"send weights in {', '.join(DTYPES)}")])
    return FORMATS[tensor.dtype]
