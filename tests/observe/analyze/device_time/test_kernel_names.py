"""Names of kernels, short for people and alike for comparing."""

import pytest

from meshwright.observe.analyze.device_time.kernel_names import normalize_kernel_name, shorten_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nt"),
        ("ncclDevKernel_AllGather_RING_LL(ncclArgs<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
            " at::detail::Array<char*, 3> >(int, float)",
            "vectorized_elementwise_kernel CUDAFunctor_add",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<int>>>",
            "FlashAttnBwdSm90",
        ),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm>(int)",
            "cutlass_80_tensorop_s1688gemm",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int)",
            "CatArrayBatchedCopy",
        ),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
    ],
)
def test_namespaces_arguments_and_wrappers_go(name: str, short: str) -> None:
    assert shorten_name(name) == short


def test_a_width_cuts() -> None:
    assert shorten_name("abcdefghij", 5) == "abcd…"


def test_numbers_of_the_compiler_do_not_part_kernels() -> None:
    assert normalize_kernel_name("triton_poi_fused_add_3") == normalize_kernel_name(
        "triton_poi_fused_add_17"
    )
    assert normalize_kernel_name("gemm_3") != normalize_kernel_name("gemm_17")
