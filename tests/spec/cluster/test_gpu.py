import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.cluster import Gpu, SpecSource
from meshwright.spec.cluster.gpu import NUMERIC_FIELDS


def test_peak_flops_follows_the_layouts_precision(hopper: Gpu) -> None:
    assert hopper.peak_flops("bf16") == 1e15
    for precision in ("fp8", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise"):
        assert hopper.peak_flops(precision) == 2e15


def test_peak_flops_names_what_the_device_has_instead(hopper: Gpu) -> None:
    with pytest.raises(InputError, match=r"hopper \(sm_90\) has no fp16.*bf16, fp8"):
        hopper.peak_flops("fp16")


def test_peak_flops_suggests_a_precision_for_a_misspelt_one(hopper: Gpu) -> None:
    with pytest.raises(InputError, match="did you mean bf16"):
        hopper.peak_flops("bf61")


def test_block_scaled_formats_need_a_device_that_scales_blocks(hopper: Gpu) -> None:
    with pytest.raises(InputError, match="no mxfp8"):
        hopper.peak_flops("mxfp8")
    blackwell = msgspec.structs.replace(hopper, arch="sm_100a", fp4_flops=4e15)
    assert blackwell.peak_flops("mxfp8") == 2e15
    assert blackwell.peak_flops("nvfp4") == 4e15


def test_every_bad_figure_is_listed_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Gpu(
            name="",
            title="x",
            vendor="x",
            arch="sm_90",
            bf16_flops=-1.0,
            memory_bytes=0,
            memory_bytes_per_s=float("nan"),
            sms=1.5,  # type: ignore[arg-type]
        )
    places = {problem.where for problem in caught.value.problems}
    assert places == {"name", "bf16_flops", "memory_bytes", "memory_bytes_per_s", "sms"}


def test_a_device_without_any_peak_is_refused(hopper: Gpu) -> None:
    with pytest.raises(InputError, match="no peak"):
        msgspec.structs.replace(hopper, bf16_flops=None, fp8_flops=None)


def test_a_source_must_cover_figures_that_exist(hopper: Gpu) -> None:
    source = SpecSource(fields=("bf16_flop",), text="somewhere")
    with pytest.raises(InputError, match="did you mean bf16_flops"):
        msgspec.structs.replace(hopper, sources=(source,))


def test_figures_lists_every_number_of_a_gpu(hopper: Gpu) -> None:
    numbers = {
        field.name
        for field in msgspec.structs.fields(Gpu)
        if field.type in (int, float, float | None, int | None)
    }
    assert numbers == set(NUMERIC_FIELDS)
