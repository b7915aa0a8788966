"""How near collectives over virtual ranks come to the bandwidth of the device that holds them.

All ranks' buffers lie on one GPU, so what a collective costs is what its copies and adds cost
there. Bytes are counted as the device sees them: a copy reads and writes each byte, an add reads
two and writes one, a switch that adds up n ranks reads n and writes one, a multicast the reverse.
The yardstick is torch's own `copy_` of large buffers, counted the same way, in the same run. Torch
operations that make the same moves are given the same count, although a sum of many places passes
through memory more often there than in our kernel.
"""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.result import figure
from meshwright.errors import MissingDependency
from meshwright.policy.collective import Collective, CollectiveOp, build_algorithm

if TYPE_CHECKING:
    import torch

    from meshwright.run.kernels.collective import VirtualRanks

NAME = "collective_kernels"
QUESTION = "How near do collectives over virtual ranks come to the copy bandwidth of one GPU?"

RANKS = 8
MIB = 2**20
SIZES_MIB = (1, 4, 16, 64, 256, 1024)
LARGE_MIB = 64
"""From here on eight buffers are far larger than any cache, and the target holds."""
TARGET = ">= 85"


class Case(NamedTuple):
    """An algorithm of the library."""

    name: str
    op: CollectiveOp
    pieces: int | None = None

    def built(self) -> Collective:
        """Return it for the ranks of this benchmark."""
        return build_algorithm(self.name, self.op, RANKS, pieces=self.pieces)


KERNELS = {"copy": Case("ring", "all_gather"), "reduction": Case("ring", "reduce_scatter")}
"""Algorithms that do nothing else than copy, and nothing else than add."""
CASES = (
    Case("ring", "all_reduce"),
    Case("double_tree", "all_reduce", 8),
    Case("halving_doubling", "all_reduce"),
    Case("two_shot", "all_reduce"),
    Case("nvls", "all_reduce"),
    Case("pairwise", "all_to_all"),
)


class Times(NamedTuple):
    """Seconds of one run, as recorded launches."""

    bytes_moved: int
    steps_s: float
    at_once_s: float
    torch_s: float


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU; `quick` takes small messages, and makes do with the interpreter."""
    import torch

    if torch.cuda.is_available():
        return _measure_gpu((1, 16) if quick else SIZES_MIB)
    if not quick:
        raise MissingDependency(
            "this benchmark needs a CUDA GPU", "run it with --quick to see it work"
        )
    return _measure_interpreted()


def _measure_gpu(sizes_mib: tuple[int, ...]) -> dict[str, object]:
    import torch
    import triton

    copy_per_s = _torch_copy_bytes_per_s(4096 * MIB)
    figures, peers = (
        [],
        [figure("torch copy_ of 4 GiB, read and written", copy_per_s / 1e9, "GB/s")],
    )
    for kind, case in KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            times = _times(case, max(sizes_mib), dtype)
            word = str(dtype).removeprefix("torch.")
            name = f"{kind} kernel, {word}, {max(sizes_mib)} MiB"
            share = times.bytes_moved / min(times.steps_s, times.at_once_s) / copy_per_s
            figures.append(figure(name, 100 * share, "% of copy_", TARGET))
            torch_share = times.bytes_moved / times.torch_s / copy_per_s
            peers.append(figure(f"torch, {name}", 100 * torch_share, "% of copy_"))
    checked = 0
    for case in CASES:
        checked += _check(case)
        for size_mib in sizes_mib:
            ours, theirs = _case_figures(case, size_mib, copy_per_s)
            figures += ours
            peers += theirs
    figures += _unrecorded_figures(CASES[0], min(sizes_mib))
    notes = (
        f"{RANKS} virtual ranks on one GPU, float32 where no type is named; sizes are nccl-tests "
        "sizes per rank. All runs but the last two are CUDA graphs, replayed back to back; the "
        f"median of five groups. Below {LARGE_MIB} MiB all ranks' buffers together are at most "
        "twice an H200's second-level cache, and small steps cost their launch: a share of "
        "copy_ says little there and has no target; above 100 % a step still finds in that cache "
        f"what the step before it wrote. {checked} results were compared with torch "
        f"operations in the same order and agree in every bit. Triton {triton.__version__}."
    )
    return {"figures": figures, "peers": peers, "notes": notes}


def _case_figures(
    case: Case, size_mib: int, copy_per_s: float
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    import torch

    times = _times(case, size_mib, torch.float32)
    name = f"{case.name} {case.op}, {size_mib} MiB"
    if size_mib < LARGE_MIB:
        figures = [
            figure(f"{name}, a launch per step", times.steps_s * 1e6, "µs"),
            figure(f"{name}, one launch", times.at_once_s * 1e6, "µs"),
        ]
        return figures, [figure(f"torch, {name}", times.torch_s * 1e6, "µs")]
    share = 100 * times.bytes_moved / copy_per_s
    figures = [
        figure(f"{name}, a launch per step", share / times.steps_s, "% of copy_", TARGET),
        figure(f"{name}, one launch", share / times.at_once_s, "% of copy_"),
    ]
    return figures, [figure(f"torch, {name}", share / times.torch_s, "% of copy_")]


def _unrecorded_figures(case: Case, size_mib: int) -> list[dict[str, object]]:
    """Runs that were not recorded: here it is the launching program that costs."""
    import torch

    ranks = _virtual_ranks(case, size_mib, torch.float32)
    name = f"{case.name} {case.op}, {size_mib} MiB, not recorded"
    runs = {"a launch per step": ranks.run_per_step, "one launch": ranks.run_persistent}
    return [
        figure(f"{name}, {how}", _median_s(run, lambda: _fill(ranks.buffer)) * 1e6, "µs")
        for how, run in runs.items()
    ]


def _times(case: Case, size_mib: int, dtype: "torch.dtype") -> Times:
    import torch

    ranks = _virtual_ranks(case, size_mib, dtype)
    buffer = ranks.buffer
    runs = (ranks.run_per_step, ranks.run_persistent, ranks.run_reference)
    seconds = []
    for run in runs:
        _fill(buffer)
        replay = ranks.capture_graph(run)
        seconds.append(_median_s(replay, lambda: _fill(buffer)))
        del replay
        torch.cuda.empty_cache()
    return Times(ranks.bytes_moved, *seconds)


def _virtual_ranks(case: Case, size_mib: int, dtype: "torch.dtype") -> "VirtualRanks":
    import torch

    from meshwright.run.kernels.collective import VirtualRanks
    from meshwright.run.kernels.collective.buffer_layout import make_buffer_layout

    collective = case.built()
    elements = size_mib * MIB // dtype.itemsize
    shape = (
        collective.num_endpoints,
        collective.slots * make_buffer_layout(collective, elements).slot_elements,
    )
    buffer = torch.empty(shape, dtype=dtype, device="cuda")
    _fill(buffer)
    return VirtualRanks(collective, buffer, elements=elements)


def _median_s(replay: Callable[[], object], refill: Callable[[], None]) -> float:
    """Seconds of one run: back to back, at most 30 of them before the numbers are drawn anew.

    Each all-reduce of eight ranks makes its numbers up to eight times as large: 8³⁰ still fits.
    """
    replay()
    once_s = _group_s(replay, 3)
    repeats = int(min(30, max(3, 0.05 / once_s)))
    groups = []
    for _ in range(5):
        refill()
        groups.append(_group_s(replay, repeats))
    return statistics.median(groups)


def _group_s(replay: Callable[[], object], repeats: int) -> float:
    import torch

    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _torch_copy_bytes_per_s(size: int) -> float:
    import torch

    here = torch.empty(size // 4, device="cuda").normal_()
    there = torch.empty_like(here)
    return 2 * size / _median_s(lambda: there.copy_(here), lambda: None)


def _fill(buffer: "torch.Tensor") -> None:
    buffer.normal_()


def _check(case: Case) -> int:
    """Compare with torch in every bit, on uneven messages; returns how many results were."""
    import torch

    compared = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        elements = RANKS * 100_003
        inputs = [
            torch.empty(elements, device="cuda").normal_(std=100).to(dtype) for _ in range(RANKS)
        ]
        compared += _agree(case.built(), inputs, None)
    return compared


def _agree(collective: Collective, inputs: list["torch.Tensor"], tile: int | None) -> int:
    import torch

    from meshwright.run.kernels.collective import VirtualRanks

    def outputs(run: Callable[["VirtualRanks"], None]) -> "torch.Tensor":
        ranks = VirtualRanks.from_inputs(collective, inputs, tile=tile)
        run(ranks)
        return torch.stack(ranks.outputs())

    wanted = outputs(VirtualRanks.run_reference)
    for run in (VirtualRanks.run_per_step, VirtualRanks.run_persistent):
        if not torch.equal(outputs(run), wanted):
            kind = inputs[0].dtype
            raise AssertionError(f"{collective.name} differs from torch with {kind}")
    return 2


def _measure_interpreted() -> dict[str, object]:
    """Show that it works, without a GPU: no figure of this says anything about speed."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    compared = 0
    for case in (*KERNELS.values(), *CASES):
        inputs = [torch.randint(-9, 9, (RANKS * 20,)).float() for _ in range(RANKS)]
        if case.op == "all_gather":
            inputs = [each[:20] for each in inputs]
        compared += _agree(case.built(), inputs, 64)
    notes = "Triton's interpreter on the CPU: correctness only."
    return {"figures": [figure("results equal to torch's", compared, "results")], "notes": notes}
