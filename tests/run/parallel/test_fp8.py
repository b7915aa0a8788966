"""Products in fp8 under a layout are as near to float32 as they are on one device."""

import pickle

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch
import torch.distributed as dist
from msgspec.structs import replace

from meshwright.cli.parity.command import make_optimizer_factory
from meshwright.run.kernels.fp8.quantization import (
    BLOCK,
    Fp8Matrix,
    dequantize,
    quantize_blockwise,
    quantize_rowwise,
    quantize_tensorwise,
)
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.verify.deviation import LOSS, Deviation, list_deviations
from meshwright.run.parallel.verify.layout_verification import get_width_multiple, run_baseline
from meshwright.run.parallel.verify.shrunk_model import shrink_model
from meshwright.run.parallel.verify.tolerances import ROUNDING_ERRORS
from meshwright.run.parallel.verify.verification_step import VerifyCase, run_verify_step
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Precision

DENSE = "llama3.1-8b"
CASES: dict[Precision, list[tuple[str, Layout]]] = {
    "fp8-tensorwise": [
        (DENSE, Layout(tp=4, microbatch=2)),
        (DENSE, Layout(tp=2, sequence_parallel=True, dp=2, zero=3)),
        ("mixtral-8x7b", Layout(tp=2, dp=2, ep=2, zero=1)),
    ],
    "fp8-rowwise": [
        (DENSE, Layout(tp=2, sequence_parallel=True, pp=2, recompute="full")),
        (DENSE, Layout(dp=4, zero=2, shard=2)),
        (DENSE, Layout(tp=2, cp=2, sequence_parallel=True)),
        ("deepseek-v3", Layout(tp=2, sequence_parallel=True, dp=2, ep=4, expert_tp=1, zero=3)),
    ],
    "fp8-blockwise": [
        (DENSE, Layout(tp=2, sequence_parallel=True, dp=2, zero=3)),
        (DENSE, Layout(tp=2, pp=2, schedule="zb-h1")),
    ],
}


def on_rank(told: bytes) -> list[list[Deviation]]:
    """Run every case on this rank."""
    found = []
    for asked, layout, base in pickle.loads(told):
        mine = run_verify_step(asked, layout)
        found.append(list_deviations(asked.model, layout, dist.get_rank(), mine, base))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", CASES)
def test_layouts_are_as_near_to_float32_as_one_device_in_fp8(precision: Precision) -> None:
    told = []
    for name, given in CASES[precision]:
        model = catalog.get_model(name)
        small = shrink_model(
            model, [given], sequence_length=32, multiple=get_width_multiple(precision)
        )
        asked = VerifyCase(small.model, 8, 32, 0, make_optimizer_factory(small.model))
        layout = replace(small.layouts[0], precision=precision)
        told.append((asked, layout, run_baseline(asked, precision)))
    by_rank = spawn_ranks(4, on_rank, pickle.dumps(told), timeout_s=150)
    for number, (name, layout) in enumerate(CASES[precision]):
        found = [each for lists in by_rank for each in lists[number]]
        assert [(name, layout, each) for each in found if each.exceeds_limit] == []
        # bf16 alone would be off by less than a tenth of this: products were in fp8.
        worst = max(each.error for each in found if each.kind == "activation" and each.name != LOSS)
        assert worst > ROUNDING_ERRORS[precision] / 2


def part_of(x: torch.Tensor, scaling: str, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what fp8 makes of some columns of a matrix, cut after and before it is written."""
    whole, part = (_written(each.contiguous(), scaling) for each in (x, x[:, columns]))
    return dequantize(whole)[:, columns], dequantize(part)


def _written(x: torch.Tensor, scaling: str) -> Fp8Matrix:
    if scaling == "tensorwise":
        return quantize_tensorwise(x).direct
    if scaling == "rowwise":
        return quantize_rowwise(x).direct
    return quantize_blockwise(x, "1x128" if scaling == "blockwise" else "128x128").direct


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_part_with_scales_of_its_own_is_no_coarser(scaling: str) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    x[:, :256] *= 32  # one rank's columns have larger numbers
    cut_after, cut_before = part_of(x, scaling, slice(256, 512))
    exact = x[:, 256:]
    assert (cut_before - exact).norm() <= (cut_after - exact).norm()


@pytest.mark.parametrize("scaling", ["blockwise", "blockwise of weights"])
def test_blocks_of_a_part_cut_at_multiples_of_128_are_those_of_the_whole(scaling: str) -> None:
    x = torch.randn(BLOCK, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    cut_after, cut_before = part_of(x, scaling, slice(2 * BLOCK, 4 * BLOCK))
    assert torch.equal(cut_after, cut_before)
