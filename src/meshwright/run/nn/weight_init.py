"""First values of parameters: a pure function of seed, name and place in the tensor.

Each number is hashed from its parameter's name and its index, so any slice of any sharding, on any
kind of device, starts from the same weights. Matrices are normal(0, 0.02), products that end a
branch smaller by 1/sqrt(2 · layers) (GPT-2's rule); norms start at one, biases at nought; a module
may say otherwise by `get_initial_values`, a dict from its parameters' own names to numbers or
tensors.
"""

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.run.nn.sharding.shard_spec import ShardSpec

INIT_STD = 0.02
"""Standard deviation of first weights (GPT-2, Llama and most since)."""
OUTPUT_PROJECTIONS = {("mixer", "o"), ("mixer", "out"), ("mlp", "down"), ("shared", "down")}
"""Products that end a branch: the part of a layer, and their name in it."""
_PIECES = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Numbers hashed at once: what fits a processor's caches, what fills a GPU."""


def materialize(
    decoder: nn.Module,
    device: torch.device | str,
    seed: int = 0,
    shard_specs: Mapping[str, ShardSpec] | None = None,
) -> None:
    """Give a decoder built without memory its memory on a device, and its first weights."""
    allocate_parameters(decoder, device)
    initialize_weights(decoder, seed, shard_specs)


def allocate_parameters(decoder: nn.Module, device: torch.device | str) -> None:
    """Give every tensor of a module memory on a device, as `to_empty` does, and no values.

    That one asks tensors without memory for another like them, for which torch loads all of sympy:
    a second of every process that makes a model.
    """
    for module in decoder.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            empty = torch.empty(old.shape, dtype=old.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=old.requires_grad))
        for name, held in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(held.shape, dtype=held.dtype, device=device))


@torch.no_grad()
def initialize_weights(
    decoder: nn.Module, seed: int = 0, shard_specs: Mapping[str, ShardSpec] | None = None
) -> None:
    """Set every parameter to its first value, in place; `shard_specs` names those held in part."""
    held = shard_specs or {}
    layers = getattr(getattr(decoder, "model", None), "layers", 1)
    for path, module in decoder.named_modules():
        given = module.get_initial_values() if hasattr(module, "get_initial_values") else {}
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            value = given.get(name)
            if isinstance(value, Tensor):
                parameter.copy_(value if full not in held else held[full].select_local(value))
            elif value is not None:
                parameter.fill_(value)
            elif name == "bias" or parameter.dim() < 2:
                parameter.zero_()
            else:
                fill_normal(parameter, full, seed, get_init_std(full, layers), held.get(full))


def get_init_std(name: str, layers: int) -> float:
    """Return the standard deviation of a matrix's first values."""
    parts = name.removesuffix(".weight").split(".")
    ends_branch = tuple(parts[-2:]) in OUTPUT_PROJECTIONS
    return INIT_STD / math.sqrt(2 * layers) if ends_branch else INIT_STD


@torch.no_grad()
def fill_normal(
    tensor: Tensor, name: str, seed: int, deviation: float, holding: ShardSpec | None = None
) -> None:
    """Fill a tensor with the normal numbers of its parameter, or of the part that is held."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    flat = tensor.view(-1)
    if not flat.numel() or tensor.is_meta:
        return
    size = _PIECES.get(tensor.device.type, 1 << 20)
    if holding is None or holding.is_unsharded:
        for start in range(0, flat.numel(), size):
            piece = flat[start : start + size]
            index = torch.arange(start, start + piece.numel(), device=tensor.device)
            piece.copy_(_normal(_hash(index, key)).mul_(deviation))
        return
    rows, *others = holding.global_indices(tensor.device)
    inside = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for places, whole in zip(others, holding.global_shape[1:], strict=True):
        inside = (inside[:, None] * whole + places).view(-1)
    width = math.prod(holding.global_shape[1:])
    each = max(1, size // inside.numel())
    for first in range(0, len(rows), each):
        index = (rows[first : first + each, None] * width + inside).view(-1)
        piece = flat[first * inside.numel() :][: index.numel()]
        piece.copy_(_normal(_hash(index, key)).mul_(deviation))


def _hash(index: Tensor, key: int) -> Tensor:
    """Mix 64-bit integers thoroughly: SplitMix64's output function (Steele et al., OOPSLA 2014)."""
    mixed = index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= _shifted(mixed, shift)
        mixed *= _signed(factor)
    return mixed ^ _shifted(mixed, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with noughts: torch's own shift repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _normal(bits: Tensor) -> Tensor:
    """Make one normal number of each 64 bits (Box and Muller, 1958)."""
    radius = ((bits & 0xFFFFFFFF).double() + 1) * 2.0**-32
    angle = _shifted(bits, 32).double() * (2 * math.pi * 2.0**-32)
    return radius.log_().mul_(-2).sqrt_().mul_(angle.cos_())
