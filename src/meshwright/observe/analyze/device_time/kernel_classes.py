"""What kernels and host spans are, by their names.

Names are those of PyTorch (ATen templates), cuBLAS, cuDNN, CUTLASS, MIOpen and hipBLASLt as they
stand in profiles. Each distinct name is read once for all ranks. Kernels of our own trainer have
the names of their functions in `run/kernels`.
"""

import re
from functools import lru_cache
from typing import Literal

from meshwright.observe.analyze.device_time.host_stalls import COMPILATION_PATTERN
from meshwright.observe.analyze.device_time.idle_time import DATA_LOADING_PATTERN
from meshwright.predict.step.kernel_kinds import KernelKind

_KERNELS = {
    "elementwise": r"elementwise_kernel",
    "foreach": r"multi_tensor_apply_kernel",
    "fused update": r"(?i:fused_?(adam|sgd|adagrad))|AdamFunctor|SGDFunctor|LAMB\w*Functor",
    "cast": r"(bfloat16|float16|half|float8\w*)_copy_kernel_cuda|"
    r"unrolled_elementwise_kernel<.*direct_copy_kernel|direct_copy_kernel.*LoadWithCast|"
    r"gpu_kernel_impl<at::native::direct_copy_kernel",
    "strided copy": r"nocast<at::native::direct_copy_kernel|nocast\w*<.*direct_copy_kernel_cuda",
    "concatenation": r"CatArrayBatchedCopy",
    "layout": r"(?i)nchw_?to_?nhwc|nhwc_?to_?nchw|batched_transpose_|convert_layout|"
    r"transpose_readWrite_alignment",
    "gemm": r"(?i)gemm|cijk_|nvjet|xmma|matmul|\bbmm_|implicit_convolve|"
    r"\b[dw]grad|fprop|igemm|conv\w*_(fwd|bwd)|winograd",
    "fp32 gemm": r"(?i)sgemm|scudnn|simt_s|ffma|dgrad_engine<float|wgrad_alg\w*_engine<float|"
    r"Cijk_\w+_SB_",
    "misaligned gemm": r"tensorop\w*gemm\w*_align[12]\b",
    "softmax": r"(?i)(?<!log)_?softmax_?(warp_)?forward(?!.*LogSoftMax)|softmax_warp_forward",
    "loss": r"LogSoftMax|log_softmax|nll_loss|cross_entropy(?!.*triton)",
    "efficient attention": r"fmha_cutlass[FB]|AttentionKernel<|AttentionBackwardKernel|"
    r"PyTorchMemEffAttention",
    "embedding gradient": r"embedding_backward_feature|compute_grad_weight|sum_and_scatter|"
    r"krn_partial_segment|embedding_dense_backward",
    "index gradient": r"indexing_backward_kernel",
    "fill": r"FillFunctor",
    "half": r"(?i)bf16|f16|half|bfloat16|_h_bz|tst_",
}
_KERNEL_PATTERNS = {name: re.compile(pattern) for name, pattern in _KERNELS.items()}

StepTimeKind = KernelKind | Literal["data", "other", "idle"]
"""A kind of work; copies from the host; kernels nobody knows; nothing at all."""

_TRAINER_KERNELS: tuple[tuple[StepTimeKind, str], ...] = (
    ("attention", r"sdpa|flash|fmha|attention|dot_do_o|convert_dq|flex"),
    ("grouped_gemm", r"grouped"),
    ("gemm", r"nvjet|gemm|cutlass|splitK|cublas|wgmma|matmul|_mm_"),
    ("casts", r"amax_kernel|cast_(tile|row|block)"),
    ("optimizer", r"_update_chunks"),
    ("gradient_norm", r"_square_chunks|_add_up"),
    ("loss", r"_turn_row|^_turn$|^_ignore$|^_scale$"),
    ("rotary", r"rotary|qk_norm_rope"),
    ("norms", r"rms_norm|_add_parts"),
    ("activations", r"^_gate$|^_ungate$"),
    (
        "routing",
        r"_copy_kernel|_sum_kernel|_spread_kernel|_weigh_kernel|topk|TopK|bincount|histogram",
    ),
    ("embedding", r"_add_equal|index_select|embedding|vectorized_gather|indexSelect"),
    ("data", r"Memcpy HtoD"),
)
_TRAINER_KERNEL_PATTERNS = [(part, re.compile(pattern)) for part, pattern in _TRAINER_KERNELS]

_HOST = re.compile(
    "|".join(
        (
            f"(?P<loading>{DATA_LOADING_PATTERN.pattern})",
            f"(?P<compiling>{COMPILATION_PATTERN.pattern}|^CompiledFxGraph|torch/_dynamo/convert_frame)",
            r"(?P<collecting>^Python GC|^gc\.collect|<built-in function collect>|^garbage_collect)",
            r"(?P<saving>(?i:save_?checkpoint|checkpoint_?save)|^torch/serialization\.py\(\d+\): "
            r"save|^torch\.save|state_dict_saver\.py\(\d+\): (async_)?save)",
            r"(?P<evaluating>(?i:^eval(uate|uation)?$|^validat(e|ion)$))",
            r"(?P<allocating>^(cuda|hip)(Malloc|Free)(Async|Host)?$|^cuMem(Create|Map|Unmap|"
            r"SetAccess|Release)$|^(cuda|hip)(HostAlloc|FreeHost)$)",
            r"(?P<waiting>^(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(WithStream)?$)",
            r"(?P<updating>^Optimizer\.step#)",
            r"(?P<zeroing>^Optimizer\.zero_grad#)",
            r"(?P<accumulating>^torch::autograd::AccumulateGrad$)",
            r"(?P<reading>^aten::(item|_local_scalar_dense)$)",
            r"(?P<counting>^aten::(nonzero|masked_select|unique\w*|_unique2|repeat_interleave)$)",
            r"(?P<moving>^aten::(to|_to_copy|copy_)$)",
            r"(?P<barring>^c10d::barrier$|^nccl:barrier|^gloo:barrier)",
            r"(?P<clipping>clip_grad_norm)",
        )
    )
)


@lru_cache(maxsize=65536)
def classify_kernel(name: str) -> frozenset[str]:
    """What a kernel is, in the words of this module's table."""
    return frozenset(sort for sort, pattern in _KERNEL_PATTERNS.items() if pattern.search(name))


@lru_cache(maxsize=65536)
def classify_host_span(name: str) -> str:
    """What a span of the host is: `loading`, `compiling`, `waiting`, …; empty for the rest."""
    match = _HOST.search(name)
    return (match.lastgroup or "") if match else ""


def classify_trainer_kernel(name: str) -> StepTimeKind:
    """Return what a kernel does; `other` where its name does not say."""
    return next(
        (part for part, pattern in _TRAINER_KERNEL_PATTERNS if pattern.search(name)), "other"
    )
