"""Names of collectives and kernels, in every writer's spelling."""

import pytest

from meshwright.timeline.readers.parsing.communication_names import (
    dtype_bytes,
    match_communication_rule,
    normalize_collective,
    normalize_dtype,
    parse_kernel_dtype,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("send", "send"),
        ("recv", "recv"),
        ("barrier", "barrier"),
        ("wait", None),
        ("coalesced", None),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("void deep_ep::internode_ll::dispatch<true, 7168>(void*)", "all_to_all"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(…)", "all_reduce"),
    ],
)
def test_collectives_have_one_spelling(name: str, expected: str | None) -> None:
    assert normalize_collective(name) == expected


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", "nccl"),
        ("ncclKernel_AllReduce", "nccl"),
        ("void deep_ep::intranode::combine<…>", "deepep"),
        ("void vllm::cross_device_reduce_2stage<…>", "custom all-reduce"),
        ("nvshmemi_transfer", "nvshmem"),
    ],
)
def test_kernels_that_communicate_name_their_library(name: str, library: str) -> None:
    rule = match_communication_rule(name)
    assert rule is not None
    assert rule.library == library


@pytest.mark.parametrize("name", ["aten::mm", "void reduce_kernel<512>", "ampere_sgemm_128x64"])
def test_other_kernels_compute(name: str) -> None:
    assert match_communication_rule(name) is None


def test_element_types_have_one_spelling_and_a_size() -> None:
    spelled = {"BFloat16": "bf16", "Float": "fp32", "c10::Half": "fp16", "torch.int64": "int64"}
    assert {name: normalize_dtype(name) for name in spelled} == spelled
    assert [dtype_bytes(ours) for ours in spelled.values()] == [2, 4, 2, 8]
    assert normalize_dtype("Quantised7") == "Quantised7"
    assert dtype_bytes("Quantised7") is None


def test_a_reductions_kernel_names_its_element_type() -> None:
    assert parse_kernel_dtype("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x<f32>)") == "bf16"
    assert parse_kernel_dtype("ncclDevKernel_AllGather_RING_LL(x)") is None
