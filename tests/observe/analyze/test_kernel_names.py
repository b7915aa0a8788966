"""Names of kernels, short for people and alike for comparing."""

import pytest

from meshwright.observe.analyze.kernel_names import alike, short_name


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
    assert short_name(name) == short


def test_a_width_cuts() -> None:
    assert short_name("abcdefghij", 5) == "abcd…"


def test_numbers_of_the_compiler_do_not_part_kernels() -> None:
    assert alike("triton_poi_fused_add_3") == alike("triton_poi_fused_add_17")
    assert alike("gemm_3") != alike("gemm_17")
