"""Which kernels communicate, by their names, and which rule says so.

Libraries beside NCCL move data between GPUs in kernels of their own; what they are called is known
from their sources. A kernel whose name no rule knows computes. Also brings the names of
collectives and element types, which every writer spells in its own way, to one spelling.
"""

import re
from functools import lru_cache
from typing import NamedTuple


class CommunicationRule(NamedTuple):
    """A library's kernels."""

    library: str
    pattern: re.Pattern[str]
    reason: str
    """What in the name tells."""


def _rule(library: str, pattern: str, why: str) -> CommunicationRule:
    return CommunicationRule(library, re.compile(pattern), why)


COMMUNICATION_RULES = (
    _rule(
        "nccl",
        r"(?i)^(void )?(ncclDev|nccl)[A-Za-z]*Kernel|^ncclSymk|^ncclSymDev",
        "nccl…Kernel",
    ),
    _rule("rccl", r"(?i)^(void )?rccl|^ncclDevKernel_Generic", "rccl…"),
    _rule("msccl", r"(?i)\bmsccl(pp)?(::|_|Kernel)", "msccl"),
    _rule("deepep", r"\bdeep_ep::|\b(internode|intranode)(_ll)?::", "deep_ep::, internode::"),
    _rule("nvshmem", r"(?i)\bnvshmem|\brocshmem", "nvshmem"),
    _rule(
        "custom all-reduce",
        r"cross_device_reduce|\b(one|two)ShotAllReduce|allreduce_fusion_kernel|"
        r"\b(one|two)_shot_all_?reduce|multimem_(all_reduce|one_shot|two_shot)|"
        r"quickreduce|all_reduce_two_shot|userbuffers|(?i:symm_mem)",
        "names of vLLM, SGLang, TensorRT-LLM, FlashInfer and torch",
    ),
    _rule("hccl", r"(?i)^hccl|_hccl_", "hccl…"),
)


@lru_cache(maxsize=65536)
def match_communication_rule(name: str) -> CommunicationRule | None:
    """Return the rule that takes a kernel for communication, if there is one."""
    return next((rule for rule in COMMUNICATION_RULES if rule.pattern.search(name)), None)


_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("quickreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("all2all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)
_DISPATCH = re.compile(r"\b(dispatch|combine|notify_dispatch|cached_notify\w*)\b")


@lru_cache(maxsize=65536)
def normalize_collective(name: str) -> str | None:
    """Bring the name of a collective or of its kernel to ours, such as `all_gather`.

    `_allgather_base`, `allgather_into_tensor_coalesced` and `ncclDevKernel_AllGather_RING_LL` all
    are `all_gather`; DeepEP's dispatch and combine are `all_to_all`. None where it names none, as
    PyTorch's `wait` and `coalesced` do not. `send_recv` is a kernel that may do either, or both.
    """
    if _DISPATCH.search(name):
        return "all_to_all"
    # What follows the first bracket of a kernel's name are its parameters.
    letters = re.sub(r"[^a-z0-9]", "", name.partition("(")[0].lower())
    return next((ours for theirs, ours in _COLLECTIVES if theirs in letters), None)


_DTYPES = {
    "float": "fp32", "float32": "fp32", "f32": "fp32", "half": "fp16", "float16": "fp16",
    "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "double": "fp64", "float64": "fp64",
    "f64": "fp64", "long": "int64", "int64": "int64", "i64": "int64", "int": "int32",
    "int32": "int32", "i32": "int32", "short": "int16", "int16": "int16", "char": "int8",
    "int8": "int8", "i8": "int8", "byte": "uint8", "uint8": "uint8", "u8": "uint8",
    "bool": "bool", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3",
    "f8e4m3": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2",
    "f8e5m2": "fp8_e5m2", "uint32": "uint32", "u32": "uint32", "uint64": "uint64",
    "u64": "uint64", "complexfloat": "complex64", "complexdouble": "complex128",
}  # fmt: skip
_SIZES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint32": 4, "uint64": 8, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
_DTYPE_IN_KERNEL = re.compile(r"_(bf16|f(?:16|32|64|8e4m3|8e5m2)|[iu](?:8|32|64))(?:_|\b)")


def normalize_dtype(name: str) -> str:
    """Bring the name of an element type to ours, such as `bf16`; one we do not know stays."""
    return _DTYPES.get(name.lower().removeprefix("torch.").removeprefix("c10::"), name)


def parse_kernel_dtype(kernel: str) -> str | None:
    """The element type that the name of a kernel says, as `ncclDevKernel_…_Sum_bf16_…` does."""
    match = _DTYPE_IN_KERNEL.search(kernel.partition("(")[0])
    return _DTYPES[match[1]] if match else None


def dtype_bytes(dtype: str) -> int | None:
    """How many bytes one element takes, by our name of its type."""
    return _SIZES.get(dtype)
