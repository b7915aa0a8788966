"""The faults that are planted, one for each pattern that one rank shows, with their cost."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.observe.findings.job.job_registry import RANK_PATTERNS
from meshwright.timeline.timeline import Timeline
from validation.findings.planting import Planter, Work
from validation.findings.ways import (
    change,
    collectives,
    copies,
    crawl,
    fills,
    fragments,
    hold,
    host,
    inserts,
    kernels,
    outlier,
    round_trip,
    slow_down,
    slowed,
    small,
    stalls,
    tiny,
    waits,
)

_EW = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
_FLOAT = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
_OPTIMIZER = {"name": "Optimizer.step#AdamW.step", "category": "user_annotation"}
_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"


class Fault(NamedTuple):
    """How a fault is planted."""

    plant: Callable[[Planter, int], int]
    """Plants so many ns of cost, as the pattern counts it; what it planted in truth."""
    also: tuple[str, ...] = ()
    """Patterns that such a fault shows too, by its nature."""
    least_steps: int = 0
    """Fewer steps cannot show it."""


def planted(part: Timeline, name: str, times: float, seed: int) -> tuple[Timeline, int]:
    """A timeline with a fault that costs `times` the least share that its pattern tells."""
    planter = Planter(part, seed)
    least = RANK_PATTERNS[name][0].min_cost
    wanted = min(0.6, times * least)
    # The fault makes the window longer: x / (window + x) is the share.
    cost = round(planter.window_ns * wanted / (1 - wanted))
    true = FAULTS[name].plant(planter, cost)
    return planter.timeline(planter.columns.pop("counters", None)), true  # type: ignore[arg-type]


_CHAIN = 6
FAULTS: dict[str, Fault] = {
    "launch-bound": Fault(crawl),
    "host-bound": Fault(stalls(8, host("train.py(10): preprocess", "python_function"))),
    "tiny-kernels": Fault(tiny),
    "queued-kernel-delay": Fault(hold),
    "profiler-overhead": Fault(stalls(8, host("Buffer Flush", "overhead", 0.9))),
    "item-sync": Fault(waits("aten::item", "aten::_local_scalar_dense")),
    "nonzero-sync": Fault(waits("aten::nonzero")),
    "blocking-copy": Fault(waits("aten::to", "aten::_to_copy", "aten::copy_")),
    "explicit-synchronize": Fault(waits()),
    "data-loader-stall": Fault(
        stalls(8, host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"))
    ),
    "recompilation": Fault(
        stalls(8, host("_compile.compile_inner (dynamo_timed)", "user_annotation"))
    ),
    "warmup-in-profile": Fault(
        stalls(3, host("_compile.compile_inner (dynamo_timed)", "user_annotation"), last=0.3),
        ("step-outliers",),
    ),
    "garbage-collection": Fault(stalls(8, host("Python GC", "user_annotation"))),
    "checkpoint-stall": Fault(
        stalls(2, host("save_checkpoint", "user_annotation")), ("step-outliers",)
    ),
    "allocator-churn": Fault(
        stalls(12, host("cudaFree", "cuda_runtime", 0.5), host("cudaMalloc", "cuda_runtime", 0.5))
    ),
    "pageable-copy": Fault(inserts(copies("Memcpy HtoD (Pageable -> Device)"))),
    "h2d-copy-not-overlapped": Fault(inserts(copies("Memcpy HtoD (Pinned -> Device)"))),
    "d2h-copy-exposed": Fault(inserts(copies("Memcpy DtoH (Device -> Pinned)"))),
    "host-round-trip": Fault(
        round_trip, ("h2d-copy-not-overlapped", "d2h-copy-exposed", "queued-kernel-delay")
    ),
    "many-memsets": Fault(fills),
    "device-to-device-copies": Fault(inserts(copies("Memcpy DtoD (Device -> Device)"))),
    "unfused-optimizer": Fault(
        inserts(kernels(_EW, 60), of_cost=2 / 3, around=_OPTIMIZER, number=28)
    ),
    "foreach-optimizer": Fault(
        inserts(
            lambda length: [
                Work(f"void at::native::multi_tensor_apply_kernel<{kind}>", length // 4)
                for kind in ("BinaryOp", "Lerp", "PointwiseOp", "UnaryOp")
            ],
            of_cost=1 / 2,
            around=_OPTIMIZER,
        )
    ),
    "fp32-gemms": Fault(
        inserts(kernels("cutlass_80_simt_sgemm_128x128_8x4_nn_align1"), of_cost=1 / 2)
    ),
    "misaligned-gemms": Fault(
        inserts(
            kernels(
                "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>"
            ),
            of_cost=1 / 2,
        )
    ),
    "small-grid": Fault(
        inserts(kernels("void decode_kernel<bf16>()", extra='{"blocks per SM": 0.2}'), of_cost=0.8)
    ),
    "unfused-elementwise": Fault(inserts(kernels(_EW, _CHAIN), of_cost=1 - 1 / _CHAIN)),
    "dtype-casts": Fault(
        inserts(
            kernels(
                "void at::native::vectorized_elementwise_kernel<4, at::native::"
                "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
                2,
            )
        )
    ),
    "strided-copies": Fault(
        inserts(
            kernels(f"{_FLOAT}at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>", 2)
        )
    ),
    "concatenation": Fault(
        inserts(kernels("void at::native::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>"))
    ),
    "layout-conversion": Fault(
        inserts(kernels("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false>"))
    ),
    "unfused-attention": Fault(
        inserts(
            lambda length: [
                Work(_GEMM, length // 2),
                Work("void at::native::cunn_SoftMaxForward<8, c10::BFloat16, float>", length),
                Work(_GEMM, length // 2),
            ]
        )
    ),
    "slow-attention-backend": Fault(
        inserts(kernels("fmha_cutlassF_bf16_aligned_64x128_rf_sm80"), of_cost=1 / 2)
    ),
    "unfused-cross-entropy": Fault(
        inserts(
            kernels(
                "void at::native::cunn_SoftMaxForward<4, float, float, "
                "at::native::LogSoftMaxForwardEpilogue>"
            ),
            of_cost=1 / 2,
        )
    ),
    "dense-embedding-gradient": Fault(
        inserts(kernels("void at::native::compute_grad_weight<float, long>(long*)"))
    ),
    "sorted-index-gradient": Fault(
        inserts(kernels("void at::native::indexing_backward_kernel<float, 4>(long const*)"))
    ),
    "exposed-all-reduce": Fault(inserts(collectives("all_reduce"))),
    "exposed-all-gather": Fault(inserts(collectives("all_gather"))),
    "exposed-reduce-scatter": Fault(inserts(collectives("reduce_scatter"))),
    "exposed-all-to-all": Fault(inserts(collectives("all_to_all"))),
    "exposed-send-receive": Fault(inserts(collectives("send"))),
    "small-collectives": Fault(small, ("exposed-all-reduce",)),
    "communication-on-compute-stream": Fault(
        inserts(collectives("all_gather", lane="main")), ("exposed-all-gather",)
    ),
    "fp32-reduction": Fault(
        inserts(collectives("all_reduce", dtype="fp32"), of_cost=1 / 2), ("exposed-all-reduce",)
    ),
    "buffer-broadcast": Fault(inserts(collectives("broadcast"), number=24)),
    "barrier-in-loop": Fault(waits("c10d::barrier")),
    "communication-contention": Fault(slowed),
    "step-outliers": Fault(outlier, ("host-bound",), 10),
    "step-time-change": Fault(change, ("host-bound",), 20),
    "kernels-slow-down": Fault(slow_down, ("step-time-change",), 20),
    "memory-fragmentation": Fault(fragments),
}
