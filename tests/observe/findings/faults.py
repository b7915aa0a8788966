"""The faults that are planted, one for each pattern that one rank shows, with their cost."""

from collections.abc import Callable
from typing import Any, NamedTuple

from meshwright.observe.findings.registry import RANK_PATTERNS
from meshwright.timeline.timeline import Timeline
from tests.observe.findings.planting import Planter, Work

MS = 1_000_000
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
    least = RANK_PATTERNS[name][0].least_share
    wanted = min(0.6, times * least)
    # The fault makes the window longer: x / (window + x) is the share.
    cost = round(planter.window_ns * wanted / (1 - wanted))
    true = FAULTS[name].plant(planter, cost)
    return planter.timeline(planter.columns.pop("counters", None)), true  # type: ignore[arg-type]


def _stalls(number: int, *spans: dict[str, Any], last: float = 0.95) -> Callable[..., int]:
    def plant(planter: Planter, cost: int) -> int:
        for place in planter.places(number, last=last):
            planter.stall(place, cost // number, [dict(span) for span in spans])
        return cost

    return plant


def _host(
    name: str, category: str = "cpu_op", begin: float = 0.2, end: float = 2.0
) -> dict[str, Any]:
    return {"name": name, "category": category, "from": begin, "to": end}


def _sync(*operators: str) -> tuple[dict[str, Any], ...]:
    call = _host("cudaStreamSynchronize", "cuda_runtime", 0.1, 1.01)
    return (
        *(_host(name, begin=0.02 + 0.01 * at, end=1.02) for at, name in enumerate(operators)),
        call,
    )


def _inserts(
    works: Callable[[int], list[Work]], *, of_cost: float = 1.0, number: int = 12,
    around: dict[str, Any] | None = None,
) -> Callable[..., int]:  # fmt: skip
    """Insert work of `cost / of_cost` in several places; `works` gets the length of one place."""

    def plant(planter: Planter, cost: int) -> int:
        for place in planter.places(number):
            planter.insert(place, works(round(cost / of_cost / number)), around)
        return cost

    return plant


def _kernels(name: str, count: int = 4, **more: Any) -> Callable[[int], list[Work]]:
    return lambda length: [Work(name, max(1, length // count), more=more) for _ in range(count)]


def _copies(name: str, count: int = 2, **more: Any) -> Callable[[int], list[Work]]:
    given = {"category": "gpu_memcpy", "bytes": 1 << 20, **more}
    return lambda length: [
        Work(name, max(1, length // count), "memory_copy", more=given) for _ in range(count)
    ]


def _collectives(collective: str, count: int = 2, **more: Any) -> Callable[[int], list[Work]]:
    words = "".join(word.title() for word in collective.split("_"))
    given = {
        "collective": collective,
        "lane": "stream 20",
        "bytes": 64 << 20,
        "group": "dp",
        **more,
    }
    name = f"ncclDevKernel_{words}_Sum_bf16_RING_LL"
    return lambda length: [
        Work(name, max(1, length // count), "communication", more=given) for _ in range(count)
    ]


def _crawl(planter: Planter, cost: int) -> int:
    """Runs of short kernels, each launched 20 µs late."""
    number = max(100, cost // 20_000)
    runs = max(1, number // 100)
    for place in planter.places(runs):
        begin = min(place, planter.kernels.size - 2)
        works = [Work("void tiny_kernel<int>()", 5_000) for _ in range(number // runs)]
        planter.stall(begin, 100_000)
        _late_run(planter, begin, works, 20_000)
    return int(number // runs * runs * 20_000)


def _late_run(planter: Planter, place: int, works: list[Work], gap: int) -> None:
    """Kernels that are launched one by one, each `gap` after the one before has ended."""
    kernel, launch = int(planter.kernels[place]), int(planter.launches[place])
    begin, wanted = int(planter.start[kernel]), int(planter.start[launch])
    whole = sum(one.length_ns + gap for one in works)
    planter._shift(device=False, moment=wanted, by=whole)
    planter._shift(device=True, moment=begin, by=whole)
    process, _, lane = planter.lane.partition(" stream ")
    clock = begin
    for one in works:
        planter.flow += 1
        call = {"name": "cudaLaunchKernel", "category": "cuda_runtime", "flow_out": planter.flow}
        clock += gap
        planter._add({**call, "start_ns": clock - 3_000, "duration_ns": 2_500}, launch)
        planter._add(
            {"process": process, "lane": f"stream {lane}", "category": "kernel", "kind": one.kind,
             "name": one.name, "start_ns": clock, "duration_ns": one.length_ns,
             "flow_in": planter.flow}, None,
        )  # fmt: skip
        clock += one.length_ns


def _tiny(planter: Planter, cost: int) -> int:
    """More tiny kernels than others, with gaps of 3 µs."""
    number = max(cost // 3_000, 2 * planter.kernels.size)
    gap = max(500, cost // number)
    for place in planter.places(20):
        works = [Work("void tiny_kernel<int>()", 3_000, gap_ns=gap) for _ in range(number // 20)]
        planter.insert(place, works)
    return int(number // 20 * 20 * gap)


def _hold(planter: Planter, cost: int) -> int:
    for place in planter.places(10):
        planter.hold(place, cost // 10)
    return cost


def _round_trip(planter: Planter, cost: int) -> int:
    number = max(10, cost // (3 * MS))
    for place in planter.places(number):
        given = {"category": "gpu_memcpy", "bytes": 123_456}
        part = cost // number // 3
        out = Work("Memcpy DtoH (Device -> Pinned)", part, "memory_copy", more=given)
        back = Work("Memcpy HtoD (Pinned -> Device)", part, "memory_copy", gap_ns=part, more=given)
        planter.insert(place, [out, back])
    return cost


def _fills(planter: Planter, cost: int) -> int:
    steps = max(2, len(planter.step_starts()))
    number = steps * 150
    for place in planter.places(number // 50):
        length = max(1_000, cost // number)
        given = {"category": "gpu_memset"}
        planter.insert(
            place, [Work("Memset (Device)", length, "memory_copy", more=given)] * 50,
            {"name": "Optimizer.zero_grad#AdamW.zero_grad", "category": "user_annotation"},
        )  # fmt: skip
    return number // 50 * 50 * max(1_000, cost // number)


def _small(planter: Planter, cost: int) -> int:
    number = max(2, len(planter.step_starts())) * 30
    for place in planter.places(number // 10):
        planter.insert(place, _collectives("all_reduce", 10, bytes=4096)(cost // (number // 10)))
    return cost


def _slowed(planter: Planter, cost: int) -> int:
    """Kernels beside communication take a quarter longer."""
    talks = [
        (int(planter.start[row]), int(planter.start[row] + planter.length[row]))
        for row, kind in enumerate(planter.columns["kind"])
        if kind == "communication"
    ]

    def beside(row: int, start: int) -> bool:
        end = start + int(planter.length[row])
        return any(min(end, high) - max(start, low) > 0.6 * (end - start) for low, high in talks)

    rows = [row for row in planter.kernels.tolist() if beside(row, int(planter.start[row]))]
    spent = sum(int(planter.length[row]) for row in rows)
    factor = 1 + min(1.0, max(0.25, cost / max(1, spent)))
    # Collectives go on for as long as the kernels beside them.
    chosen, total = set(rows), 0
    for row in sorted(rows, key=lambda one: int(planter.start[one])):
        more = round(int(planter.length[row]) * (factor - 1))
        end = int(planter.start[row] + planter.length[row])
        talking = [
            at for at, kind in enumerate(planter.columns["kind"])
            if kind == "communication"
            and planter.start[at] < end <= planter.start[at] + planter.length[at] + 1
        ]  # fmt: skip
        planter._shift(device=True, moment=end, by=more)
        for at in talking:
            planter.length[at] += more
        planter.length[row] += more
        total += more
    assert chosen
    return total


def _outlier(planter: Planter, cost: int) -> int:
    planter.stall(planter.places(1, first=0.4, last=0.6)[0], cost, [_host("some_python", "cpu_op")])
    return cost


def _later_steps(planter: Planter) -> list[int]:
    """Places of the first kernels of steps after the middle, one each."""
    starts = planter.step_starts()
    begun = planter.start[planter.launches]
    return [
        min(int((begun < start).sum()) + 1, planter.kernels.size - 1)
        for start in starts[len(starts) // 2 : -1]
    ]


def _change(planter: Planter, cost: int) -> int:
    places = _later_steps(planter)
    cost = max(cost, round(0.1 * planter.window_ns))
    for place in places:
        planter.stall(place, cost // len(places), [_host("some_python", "cpu_op")])
    return cost


def _slow_down(planter: Planter, cost: int) -> int:
    half = planter.step_starts()[len(planter.step_starts()) // 2]
    after = set(planter.kernels[planter.start[planter.launches] >= half].tolist())
    return planter.stretch(lambda row, _: row in after, 1.10)


def _fragments(planter: Planter, cost: int) -> int:
    planter.columns["counters"] = {  # type: ignore[assignment]
        "rank": planter.rank, "name": ["memory allocated gpu 0", "memory reserved gpu 0"],
        "unit": "bytes", "time_ns": int(planter.start[0]), "value": [40.0 * 2**30, 75.0 * 2**30],
    }  # fmt: skip
    return 0


_CHAIN = 6
FAULTS: dict[str, Fault] = {
    "launch-bound": Fault(_crawl),
    "late-host": Fault(_stalls(8, _host("train.py(10): preprocess", "python_function"))),
    "tiny-kernels": Fault(_tiny),
    "queued-work-waits": Fault(_hold),
    "profiler-overhead": Fault(_stalls(8, _host("Buffer Flush", "overhead", 0.9))),
    "item-sync": Fault(_stalls(12, *_sync("aten::item", "aten::_local_scalar_dense"))),
    "nonzero-sync": Fault(_stalls(12, *_sync("aten::nonzero"))),
    "blocking-copy": Fault(_stalls(12, *_sync("aten::to", "aten::_to_copy", "aten::copy_"))),
    "explicit-synchronise": Fault(_stalls(12, *_sync())),
    "data-loader-stall": Fault(
        _stalls(8, _host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"))
    ),
    "recompilation": Fault(
        _stalls(8, _host("_compile.compile_inner (dynamo_timed)", "user_annotation"))
    ),
    "warm-up-included": Fault(
        _stalls(3, _host("_compile.compile_inner (dynamo_timed)", "user_annotation"), last=0.3),
        ("step-outliers",),
    ),
    "garbage-collection": Fault(_stalls(8, _host("Python GC", "user_annotation"))),
    "checkpoint-stall": Fault(
        _stalls(2, _host("save_checkpoint", "user_annotation")), ("step-outliers",)
    ),
    "allocator-churn": Fault(
        _stalls(
            12, _host("cudaFree", "cuda_runtime", 0.5), _host("cudaMalloc", "cuda_runtime", 0.5)
        )
    ),
    "pageable-copy": Fault(_inserts(_copies("Memcpy HtoD (Pageable -> Device)"))),
    "input-copy-not-overlapped": Fault(_inserts(_copies("Memcpy HtoD (Pinned -> Device)"))),
    "output-copy-exposed": Fault(_inserts(_copies("Memcpy DtoH (Device -> Pinned)"))),
    "host-round-trip": Fault(
        _round_trip, ("input-copy-not-overlapped", "output-copy-exposed", "queued-work-waits")
    ),
    "fill-storm": Fault(_fills),
    "tensor-copies": Fault(_inserts(_copies("Memcpy DtoD (Device -> Device)"))),
    "unfused-optimizer": Fault(
        _inserts(_kernels(_EW, 60), of_cost=2 / 3, around=_OPTIMIZER, number=28)
    ),
    "foreach-optimizer": Fault(
        _inserts(
            lambda length: [
                Work(f"void at::native::multi_tensor_apply_kernel<{kind}>", length // 4)
                for kind in ("BinaryOp", "Lerp", "PointwiseOp", "UnaryOp")
            ],
            of_cost=1 / 2,
            around=_OPTIMIZER,
        )
    ),
    "fp32-products": Fault(
        _inserts(_kernels("cutlass_80_simt_sgemm_128x128_8x4_nn_align1"), of_cost=1 / 2)
    ),
    "unaligned-products": Fault(
        _inserts(
            _kernels(
                "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>"
            ),
            of_cost=1 / 2,
        )
    ),
    "underfilled-device": Fault(
        _inserts(
            _kernels("void decode_kernel<bf16>()", extra='{"blocks per SM": 0.2}'), of_cost=0.8
        )
    ),
    "unfused-elementwise": Fault(_inserts(_kernels(_EW, _CHAIN), of_cost=1 - 1 / _CHAIN)),
    "casts": Fault(
        _inserts(
            _kernels(
                "void at::native::vectorized_elementwise_kernel<4, at::native::"
                "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
                2,
            )
        )
    ),
    "strided-copies": Fault(
        _inserts(
            _kernels(f"{_FLOAT}at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>", 2)
        )
    ),
    "concatenation": Fault(
        _inserts(_kernels("void at::native::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>"))
    ),
    "layout-conversion": Fault(
        _inserts(_kernels("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false>"))
    ),
    "unfused-attention": Fault(
        _inserts(
            lambda length: [
                Work(_GEMM, length // 2),
                Work("void at::native::cunn_SoftMaxForward<8, c10::BFloat16, float>", length),
                Work(_GEMM, length // 2),
            ]
        )
    ),
    "slow-attention-backend": Fault(
        _inserts(_kernels("fmha_cutlassF_bf16_aligned_64x128_rf_sm80"), of_cost=1 / 2)
    ),
    "unfused-cross-entropy": Fault(
        _inserts(
            _kernels(
                "void at::native::cunn_SoftMaxForward<4, float, float, "
                "at::native::LogSoftMaxForwardEpilogue>"
            ),
            of_cost=1 / 2,
        )
    ),
    "dense-embedding-gradient": Fault(
        _inserts(_kernels("void at::native::compute_grad_weight<float, long>(long*)"))
    ),
    "sorted-index-gradient": Fault(
        _inserts(_kernels("void at::native::indexing_backward_kernel<float, 4>(long const*)"))
    ),
    "exposed-all-reduce": Fault(_inserts(_collectives("all_reduce"))),
    "exposed-all-gather": Fault(_inserts(_collectives("all_gather"))),
    "exposed-reduce-scatter": Fault(_inserts(_collectives("reduce_scatter"))),
    "exposed-all-to-all": Fault(_inserts(_collectives("all_to_all"))),
    "exposed-send-receive": Fault(_inserts(_collectives("send"))),
    "small-collectives": Fault(_small, ("exposed-all-reduce",)),
    "communication-on-compute-stream": Fault(
        _inserts(_collectives("all_gather", lane="main")), ("exposed-all-gather",)
    ),
    "fp32-reduction": Fault(
        _inserts(_collectives("all_reduce", dtype="fp32"), of_cost=1 / 2), ("exposed-all-reduce",)
    ),
    "buffer-broadcast": Fault(_inserts(_collectives("broadcast"), number=24)),
    "barrier-in-loop": Fault(_stalls(12, *_sync("c10d::barrier")), ()),
    "communication-slows-compute": Fault(_slowed),
    "step-outliers": Fault(_outlier, ("late-host",), 10),
    "step-time-change": Fault(_change, ("late-host",), 20),
    "kernels-slow-down": Fault(_slow_down, ("step-time-change",), 20),
    "memory-fragmentation": Fault(_fragments),
}
