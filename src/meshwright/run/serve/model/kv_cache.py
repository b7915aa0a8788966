"""`PagedKVCache`: keys and values of many sequences, in blocks that any sequence can be given.

Layers of one shape share one tensor, [layers, 2 or 1, blocks, heads, tokens of a block, width]:
what one head reads of a block is contiguous, and what one layer reads lies together, so that a pass
over a layer touches few pages of the device's memory. A layer shows it in the order the kernels
name: (blocks, tokens, heads, width).

Blocks leave the device (to host memory, to a file, to another engine) as rows of bytes, all layers
of a block in one row.

Latent attention keeps one vector a token, the latent and the turned rotary key behind it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer

FP8 = torch.float8_e4m3fn


class KVCacheSpec(NamedTuple):
    """What one layer keeps of a token."""

    num_tensors: int
    """2 for keys and values, 1 for latents."""
    num_kv_heads: int
    head_size: int


class LayerKVCache(NamedTuple):
    """The blocks of one layer: keys and values, or latents alone."""

    key_cache: Tensor
    """(blocks, tokens of a block, heads, width); of latents (blocks, tokens, width)."""
    value_cache: Tensor | None
    key_scale: Tensor | None
    """fp32, what numbers in fp8 are multiplied by; None where they are not in fp8."""
    value_scale: Tensor | None


class PagedKVCache:
    """The blocks of all layers of one decoder, with the heads that it holds."""

    layers: list[LayerKVCache | None]
    """What each layer has; None for a layer that keeps nothing by token."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        fp8: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        _check(num_blocks, block_size)
        weight = decoder.embedding.weight
        self.num_blocks, self.block_size, self.num_host_blocks = (
            num_blocks,
            block_size,
            num_host_blocks,
        )
        self.device: torch.device = weight.device
        self.dtype = FP8 if fp8 else weight.dtype
        self.specs = get_kv_cache_specs(decoder)
        self.scales = torch.ones(len(self.specs), 2, device=self.device)
        """What keys and values of each layer were divided by, in fp8."""
        self.block_bytes = compute_block_bytes(self.specs, block_size, self.dtype)
        """Bytes of one block, over all layers."""
        self._pools: list[Tensor] = []
        self._host: Tensor | None = None
        self.layers = []
        self.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether the memory is given back."""
        return not self.layers

    def sleep(self) -> None:
        """Give the memory back; what the blocks held is gone, and captured graphs are void."""
        self._pools, self.layers, self._host = [], [], None

    def wake_up(self) -> None:
        """Take the memory again, filled with noughts."""
        if not self.is_sleeping:
            return
        found: dict[int, LayerKVCache] = {}
        for shape, numbers in _by_shape(self.specs).items():
            size = (
                shape.num_tensors,
                self.num_blocks,
                shape.num_kv_heads,
                self.block_size,
                shape.head_size,
            )
            pool = torch.empty(len(numbers), *size, dtype=self.dtype, device=self.device)
            pool.view(torch.uint8).zero_()
            self._pools.append(pool)
            for place, layer in enumerate(numbers):
                found[layer] = self._layer(pool[place], layer)
        self.layers = [found.get(layer) for layer in range(len(self.specs))]
        if self.num_host_blocks:
            pinned = self.device.type == "cuda"
            self._host = torch.empty(
                self.num_host_blocks, self.block_bytes, dtype=torch.uint8, pin_memory=pinned
            )

    def _layer(self, parts: Tensor, layer: int) -> LayerKVCache:
        views = [part.transpose(1, 2) for part in parts]
        scales: list[Tensor | None] = [None, None]
        if self.dtype == FP8:
            scales = [self.scales[layer, 0], self.scales[layer, 1]]
        if len(views) == 1:
            return LayerKVCache(views[0].squeeze(2), None, scales[0], None)
        return LayerKVCache(views[0], views[1], scales[0], scales[1])

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Write what the sources hold into the targets."""
        read, write = self._numbers(sources), self._numbers(targets)
        for pool in self._raw():
            pool[:, :, write] = pool[:, :, read]

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return blocks as rows of bytes on the device, (blocks, bytes of a block)."""
        numbers = self._numbers(blocks)
        rows = [
            pool.index_select(2, numbers).permute(2, 0, 1, 3, 4, 5).flatten(1)
            for pool in self._raw()
        ]
        if not rows:
            return torch.empty(len(blocks), 0, dtype=torch.uint8, device=self.device)
        return torch.cat(rows, 1)

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Write rows of bytes into blocks."""
        if tuple(rows.shape) != (len(blocks), self.block_bytes) or rows.dtype != torch.uint8:
            what = f"{rows.dtype} of shape {list(rows.shape)} for {len(blocks)} blocks"
            fix = f"give uint8 of shape [{len(blocks)}, {self.block_bytes}], of the same model"
            raise InputError([Problem("rows", what, fix)])
        numbers, at = self._numbers(blocks), 0
        rows = rows.to(self.device, non_blocking=True)
        for pool in self._raw():
            layers, parts, _, *rest = pool.shape
            size = layers * parts * rest[0] * rest[1] * rest[2]
            each = rows[:, at : at + size].view(len(blocks), layers, parts, *rest)
            pool[:, :, numbers] = each.permute(1, 2, 0, 3, 4, 5)
            at += size

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Write blocks into host memory, behind what the device has still to do."""
        host = self._host_memory()
        for row, place in zip(self.gather(blocks), host_blocks, strict=True):
            host[place].copy_(row, non_blocking=True)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Write blocks of host memory back into the device's."""
        host = self._host_memory()
        rows = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=self.device)
        for row, place in zip(rows, host_blocks, strict=True):
            row.copy_(host[place], non_blocking=True)
        self.scatter(blocks, rows)

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """Return the bytes of blocks, for another engine that serves the same model."""
        return self.gather(blocks).cpu().numpy().tobytes()

    def import_blocks(self, blocks: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Write what another engine exported into blocks of this one."""
        if len(data) != len(blocks) * self.block_bytes:
            what = f"{len(data)} bytes for {len(blocks)} blocks of {self.block_bytes}"
            fix = "both engines need the same model, block size and number format"
            raise InputError([Problem("data", what, fix)])
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.scatter(blocks, rows.view(len(blocks), self.block_bytes))

    def _host_memory(self) -> Tensor:
        if self._host is None:
            what = "the cache has no blocks in host memory"
            raise InputError([Problem("num_host_blocks", what, "make it with num_host_blocks > 0")])
        return self._host

    def _raw(self) -> Iterable[Tensor]:
        """Show the pools as bytes: moving blocks asks nothing of their number format."""
        if self.is_sleeping:
            raise InputError([Problem("cache", "its memory is given back", "wake it first")])
        return (pool.view(torch.uint8) for pool in self._pools)

    def _numbers(self, blocks: Sequence[int]) -> Tensor:
        numbers = torch.tensor(blocks, dtype=torch.int64)
        if self.device.type == "cuda":  # from pinned memory, a copy waits for nothing
            numbers = numbers.pin_memory()
        return numbers.to(self.device, non_blocking=True)


def get_kv_cache_specs(decoder: Decoder) -> list[KVCacheSpec | None]:
    """Return what each layer of a decoder keeps by token; None for nothing."""
    found: list[KVCacheSpec | None] = []
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        match layer.mixer:
            case SelfAttention() as mixer:
                found.append(KVCacheSpec(2, mixer.kv_heads, mixer.spec.head_dim))
            case MLASelfAttention() as mixer:
                found.append(KVCacheSpec(1, 1, mixer.spec.kv_rank + mixer.spec.rope_dim))
            case _:
                found.append(None)
    return found


def compute_block_bytes(
    shapes: Iterable[KVCacheSpec | None], block_tokens: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one block takes over all layers."""
    numbers = sum(
        shape.num_tensors * shape.num_kv_heads * shape.head_size
        for shape in shapes
        if shape is not None
    )
    return numbers * block_tokens * dtype.itemsize


def _by_shape(shapes: Sequence[KVCacheSpec | None]) -> dict[KVCacheSpec, list[int]]:
    found: dict[KVCacheSpec, list[int]] = {}
    for layer, shape in enumerate(shapes):
        if shape is not None:
            found.setdefault(shape, []).append(layer)
    return found


def _check(blocks: int, block_tokens: int) -> None:
    problems = []
    if blocks < 1:
        what = f"{blocks} blocks hold no sequence"
        problems.append(Problem("num_gpu_blocks", what, "leave more memory to the cache"))
    if block_tokens < 1 or block_tokens & (block_tokens - 1):
        what = f"{block_tokens} is no power of two"
        problems.append(Problem("block_size", what, "use 16, 32, 64, 128 or 256"))
    if problems:
        raise InputError(problems)
