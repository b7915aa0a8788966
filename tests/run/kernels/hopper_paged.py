"""The kernels over pages as they are launched for an 8B model, for `hopper` to compile."""

from collections.abc import Iterator
from typing import Any

from tests.run.kernels.hopper import BF16, E4M3, FP32, INT, Kernel

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 64
STRIDES = dict.fromkeys(("page_stride", "token_stride", "head_stride"), INT)
ROWS = {"tables": "*i32", "lengths": "*i32", "table_row": INT}
NONE = dict.fromkeys(("sinks", "alibi", "k_scale", "v_scale"))


def kernels() -> Iterator[Kernel]:
    """List decode, in 32 bits too, prefill, latents, and both ways to store."""
    from meshwright.run.kernels.paged_attention import (
        paged_decode_kernel,
        paged_prefill_kernel,
        split_kv_kernel,
    )
    from meshwright.run.kernels.paged_attention.mla_decode import FEW_HEADS_TILES
    from meshwright.run.kernels.paged_attention.paged_decode import DECODE_TILES
    from meshwright.run.kernels.paged_attention.paged_prefill import PREFILL_TILES

    shape = {"G": HEADS // KV_HEADS, "K": KV_HEADS, "E": WIDTH, "BLOCK": BLOCK}
    shape |= {"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "PACKED": 4, "QUERIES": 1}
    for element, held in {1: "*i16", 2: BF16, 4: FP32}.items():
        pairs = element == 1
        cached = dict.fromkeys(("k_cache", "v_cache"), held)
        types = cached | STRIDES | ROWS | {"scale": "fp32", "softcap": "fp32"}
        types |= dict.fromkeys(("q", "out"), BF16 if pairs else held) | {"q_head": INT}
        scales = {"k_scale": FP32, "v_scale": FP32} if pairs else {}
        absent = {name: None for name in NONE if name not in scales}
        halved = {"PAIRS": pairs, "COLUMNS": WIDTH // 2 if pairs else WIDTH}
        given = types | scales | dict.fromkeys(("parts", "stats"), FP32)
        given |= {"plan": "*i32"} | dict.fromkeys(("rows", "programs", "least", "q_row"), INT)
        cut = DECODE_TILES[element, WIDTH].fit_to_block(BLOCK)
        constants = shape | absent | halved | _cut(cut) | {"ROPE": 0, "ROPE_COLUMNS": 16}
        yield Kernel(
            f"paged attention, decode, {element} bytes", paged_decode_kernel.decode_kernel, given,
            constants,
            cut.warps, cut.registers, cut.stages,
        )  # fmt: skip
        few = FEW_HEADS_TILES[element]
        latents = {"K": 1, "G": 16, "E": 512, "ROPE": 64, "ROPE_COLUMNS": 32 if pairs else 64}
        latents |= {"COLUMNS": 256 if pairs else 512, "PACKED": 16} | _cut(few)
        yield Kernel(
            f"paged attention, latents, {element} bytes", paged_decode_kernel.decode_kernel, given,
            constants | latents, few.warps, few.registers, few.stages,
        )  # fmt: skip
        if held == FP32:
            continue  # what prompts take in 32 bits lays registers aside
        tiles = PREFILL_TILES[element, WIDTH]
        given = types | scales | {"starts": "*i32"}
        given |= dict.fromkeys(("number", "left", "skip", "q_token", "out_token"), INT)
        for split in (None, "*i32"):
            sides = {
                "M": tiles.rows,
                "TILE": tiles.for_persistent_kernel.tile if split else tiles.tile,
            }
            constants = shape | absent | halved | sides | {"ROWS": 1024 if split else 64}
            name = f"paged attention, {'mixed' if split else 'prefill'}, {element} bytes"
            more = {"split": split} if split else {}
            yield Kernel(
                name, paged_prefill_kernel.prefill_kernel, given | more,
                constants if split else constants | {"split": None},
                tiles.warps, None, tiles.stages,
            )  # fmt: skip
        yield from _stores(E4M3 if pairs else BF16)
    counts = dict.fromkeys(("rows", "programs", "units", "least"), INT)
    given = counts | {"lengths": "*i32", "plan": "*i32"}
    constants = {"WINDOW": 0, "CHUNK": 0, "TILE": 64, "ROWS": 256, "PROGRAMS": 16, "QUERIES": 1}
    sizes: dict[str, Any] = {"K": 8, "G": 4, "E": 128, "PACKED": 4, "COLUMNS": 128, "PIECES": 16}
    sizes["QUERIES"] = 1
    for splits in (0, 16):
        name = f"paged attention, plan, {splits} splits"
        fixed = constants | {"SPLITS": splits}
        yield Kernel(name, split_kv_kernel.split_kv_kernel, given, fixed | {"live": None}, 4)
        yield Kernel(
            f"{name}, live", split_kv_kernel.split_kv_kernel, given | {"live": "*i32"}, fixed, 4
        )
        types = counts | {"plan": "*i32", "out": BF16, "parts": FP32, "stats": FP32}
        sizes |= {"SPLITS": splits, "sinks": None}
        yield Kernel(
            f"paged attention, join, {splits} splits",
            paged_decode_kernel.merge_splits_kernel,
            types,
            sizes,
            2,
        )


def _cut(cut: Any) -> dict[str, Any]:
    return {"TILE": cut.tile_tokens, "SPLITS": 0, "M": 16}


def _stores(cached: str) -> Iterator[Kernel]:
    from meshwright.run.kernels.paged_attention import kv_cache_write, kv_cache_write_kernel
    from meshwright.run.kernels.rotary.rotary_kernel import select_rotary_tile

    types = {"k_cache": cached, "v_cache": cached, "slots": "*i64", "number": INT} | STRIDES
    scaled = cached == E4M3
    types |= {"k_scale": FP32, "v_scale": FP32} if scaled else {}
    absent: dict[str, Any] = {} if scaled else {"k_scale": None, "v_scale": None}
    given = types | {"k": BF16, "v": BF16}
    given |= {f"{x}_{axis}": INT for x in "kv" for axis in ("token", "head")}
    tile = select_rotary_tile(KV_HEADS, KV_HEADS, WIDTH, kv_cache_write.TILE)
    shape: dict[str, Any] = {
        "K": KV_HEADS,
        "E": WIDTH,
        "BLOCK": BLOCK,
        "COLUMNS": WIDTH,
        "EIGHT_BITS": scaled,
    }
    cut = {"TOKENS": tile.tokens, "HEADS": tile.heads}
    function = kv_cache_write_kernel.write_kv_kernel
    name = f"store in pages, {cached}"
    yield Kernel(name, function, given, shape | cut | absent, kv_cache_write.WARPS)
    given = types | dict.fromkeys(("qkv", "out", "q_weight", "k_weight"), BF16)
    given |= {"cos": FP32, "sin": FP32, "row_stride": INT, "eps": "fp32"}
    tile = select_rotary_tile(HEADS, KV_HEADS, WIDTH, kv_cache_write.TILE)
    shape |= {"H": HEADS, "HALF": WIDTH // 2, "HALF_COLUMNS": WIDTH // 2}
    shape |= {"INTERLEAVED": False, "UNIT_OFFSET": False}
    cut = {"TOKENS": tile.tokens, "HEADS": tile.heads}
    function = kv_cache_write_kernel.rope_and_write_kv_kernel
    name = f"norm, turn and store in pages, {cached}"
    yield Kernel(name, function, given, shape | cut | absent, kv_cache_write.WARPS)
