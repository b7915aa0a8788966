"""Compiles kernels for Hopper on a machine that need not have a GPU, and says what came out.

Triton's interpreter accepts what its compiler refuses, and knows nothing of registers or of how
wide accesses are. This runs in a process of its own (`python -m tests.run.kernels.hopper`), since a
process either interprets or compiles, and prints one JSON object per kernel.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BF16, FP32, INT = "*bf16", "*fp32", "i32"
E4M3 = "*fp8e4nv"


class Kernel(NamedTuple):
    """A kernel as it is launched: types of its arguments, its constants, its warps."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    registers: int | None = None
    stages: int | None = None


def kernels() -> Iterator[Kernel]:
    """List the kernels of this folder at the sizes of a 1B or an 8B model."""
    yield from _norms()
    yield from _rotations()
    from meshwright.run.kernels import embedding
    from meshwright.run.kernels.activation import glu
    from meshwright.run.kernels.optimizer import grad_norm

    types = {"grad": BF16, "table": BF16, "width": INT}
    types |= dict.fromkeys(("ordered", "order", "ends"), "*i64")
    constants: dict[str, Any] = {"COLUMNS": embedding.COLUMNS}
    yield Kernel("embedding backward", embedding._add_equal, types, constants, embedding.WARPS)
    for name in ("silu", "gelu", "gelu-tanh", "swiglu-clamped"):
        constants = {"ACTIVATION": name, "F": 14336, "TILE": glu.TILE}
        types = {"gate_up": BF16, "gated": BF16, "limit": "fp32"}
        yield Kernel(f"glu {name}", glu._gate, types, constants, glu.WARPS)
        types = dict.fromkeys(("gate_up", "dgated", "dgate_up", "gated"), BF16) | {"limit": "fp32"}
        yield Kernel(f"glu {name} backward", glu._ungate, types, constants, glu.WARPS)
    yield from _losses()
    yield from _fp8()
    tables = {"addresses": "*i64", "kinds": "*i32", "chunk_tensors": "*i32", "chunk_starts": "*i64"}
    types = tables | {"chunk_lengths": "*i32", "squares": FP32, "counts": "*i32"}
    constants = {"KIND": -1, "ALIGNED": True, "CHUNK": 16384, "TILE": grad_norm.TILE}
    yield Kernel("gradient_norm", grad_norm._square_chunks, types, constants, grad_norm.WARPS)

    yield from _updates()
    yield from _streams()
    yield from _held_streams()
    from tests.run.kernels import hopper_paged

    yield from hopper_paged.kernels()


def _updates() -> Iterator[Kernel]:
    import triton.language as tl

    from meshwright.run.kernels.optimizer import fused_update

    states = ("weights", "grads", "masters", "firsts", "seconds", "first_scales", "second_scales")
    types = dict.fromkeys((*states, "keys", "places", "chunk_starts", "step"), "*i64")
    types |= dict.fromkeys(("chunk_tensors", "chunk_lengths"), "*i32")
    types |= dict.fromkeys(("shares", "decays", "pace"), FP32)
    types |= dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    formats = {"PARAM": tl.bfloat16, "GRAD": tl.bfloat16, "MASTER": False, "ALIGNED": True}
    rule = {"RULE": "adamw", "NESTEROV": False, "WRITES": True}
    for moment, warps, tile in (
        ("bf16", fused_update.WARPS, 2048),
        ("int8", fused_update.QUANTIZED_WARPS, 256),
    ):
        for gaps in (-1, 0, 3):
            constants = formats | rule | {"MOMENT": moment, "TILE": tile, "GAPS": gaps}
            name = f"adamw {moment}, {gaps} gaps"
            yield Kernel(name, fused_update._update_chunks, types, constants, warps)


def _streams() -> Iterator[Kernel]:
    from meshwright.run.kernels.gemm.skinny_gemm import GLU_TILES, LINEAR_TILES
    from meshwright.run.kernels.gemm.skinny_gemm_kernel import skinny_gemm_kernel

    for activation, table in ((None, LINEAR_TILES), ("silu", GLU_TILES)):
        ways = [
            (rows, tiles)
            for rows, each in table.items()
            for tiles in each
            if not tiles.prefetches_weight
        ]
        for rows, tiles in ways:
            sizes = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
            types = {"out": BF16, "limit": "fp32"}
            types |= dict.fromkeys(("rows", "columns", "inner"), INT)
            for name, side in (("x", tiles.rows), ("weight", tiles.columns)):
                types[name] = f"tensordesc<bf16[{side},{tiles.depth}]>"
            name = f"stream_linear {activation}, {rows} rows × {tiles.columns}, {tiles.stages}"
            constants = sizes | {"TURNED": tiles.transposed, "ACTIVATION": activation}
            yield Kernel(
                name, skinny_gemm_kernel, types, constants, tiles.warps, stages=tiles.stages
            )


def _held_streams() -> Iterator[Kernel]:
    from triton.experimental.gluon import language as gl

    from meshwright.run.kernels.gemm.skinny_gemm_prefetch_kernel import skinny_gemm_prefetch_kernel

    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    types = dict.fromkeys(("x", "weight"), f"tensordesc<bf16[64,128],{layout!r}>")
    types |= {"out": BF16, "limit": "fp32"} | dict.fromkeys(("rows", "columns", "inner"), INT)
    sizes = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 128, "STAGES": 4, "WARPS": 4}
    for activation in (None, "silu"):
        for turned in (False, True):
            constants = sizes | {"TURNED": turned, "ACTIVATION": activation}
            name = f"stream_linear held, {activation}, {'turned' if turned else 'straight'}"
            yield Kernel(name, skinny_gemm_prefetch_kernel, types, constants, 4)


def _norms() -> Iterator[Kernel]:
    from meshwright.run.kernels.norm import rms_norm_kernel
    from meshwright.run.kernels.norm.rms_norm import _launch

    lie = {"number": INT, "outer_stride": INT, "inner_stride": INT}
    for width in (128, 2048, 4096, 8192):
        shape = _launch(width)
        sizes = {"D": width, "ROWS": shape.rows, "COLUMNS": shape.width, "UNIT_OFFSET": False}
        constants = sizes | {"INNER": 32 if width == 128 else 1}
        every = dict.fromkeys(("x", "residual", "weight", "normed", "total"), BF16)
        types = every | {"rstd": FP32} | lie | {"eps": "fp32"}
        yield Kernel(
            f"rms_norm {width}", rms_norm_kernel.rms_norm_kernel, types, constants, shape.warps
        )
        every = dict.fromkeys(("x", "dnormed", "dtotal", "weight", "dx"), BF16)
        types = every | {"rstd": FP32, "parts": FP32} | lie
        constants |= {"AHEAD": True}
        name = f"rms_norm {width} backward"
        yield Kernel(name, rms_norm_kernel.rms_norm_backward_kernel, types, constants, shape.warps)


def _losses() -> Iterator[Kernel]:
    from meshwright.run.kernels.loss import cross_entropy_kernel

    types = {"logits": BF16, "labels": "*i64", "nats": FP32, "lse": FP32}
    types |= {"stride": INT, "vocab": INT, "ignore": INT}
    types |= dict.fromkeys(("scale", "softcap", "z_loss"), "fp32")
    shape = {"GRADIENT": True, "GROUPS": cross_entropy_kernel.BLOCK // 8}
    for shaped in (False, True):
        constants = dict.fromkeys(("SCALED", "CAPPED", "STEEP"), shaped) | shape
        name = "cross_entropy_rows shaped" if shaped else "cross_entropy_rows"
        function = cross_entropy_kernel._turn_row
        yield Kernel(name, function, types, constants, cross_entropy_kernel.WARPS)


def _fp8() -> Iterator[Kernel]:
    from meshwright.run.kernels.fp8 import (
        quantization_gluon_kernel,
        quantization_kernel,
        quantization_launch,
    )

    lines = dict.fromkeys(("row_amax", "column_amax"), "*i32")
    tile = {
        "HEIGHT": quantization_launch.PACKED_TILE_HEIGHT,
        "WIDTH": quantization_launch.PACKED_TILE_WIDTH,
    }
    function = quantization_kernel.packed_line_amax_kernel
    types = {"x": "*i32", "width": INT} | lines
    yield Kernel(
        "fp8 amax of lines",
        function,
        types,
        tile,
        quantization_launch.PACKED_LINE_AMAX_LAUNCH.warps,
    )
    types = {"x": BF16, "height": INT, "width": INT} | dict.fromkeys(("data", "turned"), E4M3)
    types |= dict.fromkeys(("scale", "turned_scale"), FP32)
    for power in (False, True):
        options = {"LARGEST": 448.0, "POWER_OF_TWO": power}
        given = types | dict.fromkeys(("row_amax", "column_amax"), FP32)
        function, launch = (
            quantization_gluon_kernel.cast_tile_gluon_kernel,
            quantization_launch.GLUON_CAST_PER_LINE_LAUNCH,
        )
        yield Kernel(f"fp8 cast by line {power}", function, given, options, *launch)
        given = types | dict.fromkeys(("scale_stride", "turned_stride"), INT)
        function, launch = (
            quantization_gluon_kernel.cast_tile_lines_gluon_kernel,
            quantization_launch.GLUON_CAST_LINE_BLOCKS_LAUNCH,
        )
        yield Kernel(f"fp8 cast lines of blocks {power}", function, given, options, *launch)


def _rotations() -> Iterator[Kernel]:
    import torch

    from meshwright.run.kernels.rotary import (
        qk_norm_rope,
        qk_norm_rope_backward_kernel,
        qk_norm_rope_kernel,
        rotary_kernel,
    )
    from meshwright.run.kernels.rotary.rotary import QKVSizes

    strides = {f"{x}_{axis}": INT for x in "qkv" for axis in ("batch", "token", "head")}
    angles = {"cos": FP32, "sin": FP32, "T": INT, "angle_batch": INT}
    for head_dim in (64, 128):
        for interleaved in (False, True):
            label = f"{head_dim} {'neighbours' if interleaved else 'halves'}"
            cos = torch.empty(1, head_dim // 2)
            given = QKVSizes(32, 8, head_dim), cos, interleaved, False
            options = qk_norm_rope._options(*given, qk_norm_rope.TILE, qk_norm_rope.WARPS)
            warps = options.pop("num_warps")
            every = dict.fromkeys(("qkv", "out", "q_weight", "k_weight"), BF16)
            types = every | angles | {"eps": "fp32"}
            function = qk_norm_rope_kernel.qk_norm_rope_kernel
            yield Kernel(f"norm_rotate {label}", function, types, options, warps)
            back = qk_norm_rope._options(
                *given, qk_norm_rope.BACKWARD_TILE, qk_norm_rope.BACKWARD_WARPS
            )
            warps = back.pop("num_warps")
            back |= {"AHEAD": qk_norm_rope.PREFETCH and not interleaved}
            every = dict.fromkeys(("qkv", "dq", "dk", "dv", "dqkv", "q_weight", "k_weight"), BF16)
            types = every | angles | strides | {"parts": FP32, "blocks": INT, "eps": "fp32"}
            function = qk_norm_rope_backward_kernel.qk_norm_rope_backward_kernel
            yield Kernel(f"norm_rotate {label} backward", function, types, back, warps)
            tile = rotary_kernel.select_rotary_tile(32, 8, head_dim, rotary_kernel.TILE)
            options |= {"TOKENS": tile.tokens, "HEADS": tile.heads}
            every = dict.fromkeys(("q", "k", "out"), BF16)
            types = every | angles | strides | {"out_token": INT}
            ways = {"v": None, "PARTS": 40 // tile.heads, "BACKWARD": False, "IN_PLACE": True}
            function = rotary_kernel.rotary_kernel
            warps = rotary_kernel.WARPS
            yield Kernel(f"rotary {label}", function, types, options | ways, warps)
            ways = {"PARTS": 48 // tile.heads, "BACKWARD": True, "IN_PLACE": False}
            types = types | {"v": BF16}
            yield Kernel(f"rotary {label} backward", function, types, options | ways, warps)


def compiled(kernel: Kernel) -> dict[str, Any]:
    """Compile for sm_90 with all addresses and strides multiples of 16; count what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.function.arg_names
    no_number = ("fp32", "tensordesc")
    whole = [name for name in names if not kernel.types.get(name, "fp32").startswith(no_number)]
    constants = {"PDL": True, **kernel.constants}
    kind = GluonASTSource if kernel.function.is_gluon() else ASTSource
    source = kind(
        fn=kernel.function,
        signature={name: kernel.types.get(name, "constexpr") for name in names},
        constexprs={name: value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    options = {"num_warps": kernel.warps, "maxnreg": kernel.registers}
    if kernel.stages is not None:
        options["num_stages"] = kernel.stages
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    accesses = re.findall(r"\b(?:ld|st)\.global\.(?:v(\d)\.)?b(\d+)", made.asm["ptx"])
    return {
        "name": kernel.name,
        "bytes_of_accesses": [int(many or 1) * int(bits) // 8 for many, bits in accesses],
        **_taken(made.asm["cubin"]),
    }


def _taken(cubin: bytes) -> dict[str, int]:
    """Ask cuobjdump, which comes with Triton, for registers and for what did not fit into them."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(program), "--dump-resource-usage", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", answer)[-1]
    return {"registers": int(registers), "stack_bytes": int(stack)}


if __name__ == "__main__":
    for each in kernels():
        print(json.dumps(compiled(each)), flush=True)
