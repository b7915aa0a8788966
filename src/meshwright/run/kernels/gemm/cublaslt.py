"""cuBLASLt by its C interface: products with the algorithm that was measured fastest.

torch calls cuBLAS, which takes the first proposal of a heuristic. This asks for all proposals and
times them. The library is the one torch has already loaded; numbers are those of cublasLt.h.
"""

import ctypes
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

WORKSPACE_BYTES = 64 << 20
"""Scratch memory the algorithms may use; NVIDIA advises 32 MiB or more on Hopper."""

_PROPOSALS = 16
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
_FP32, _BF16 = 0, 14  # CUDA_R_32F, CUDA_R_16BF
_TURN_FIRST, _TURN_SECOND = 3, 4  # CUBLASLT_MATMUL_DESC_TRANSA, _TRANSB
_STATUSES = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
}  # cublasStatus_t of cublas_api.h, without its prefix
_ROUNDS = 5
"""Timed runs of each proposal, after one that is not."""
_NEAR = 1.01
"""Times within this factor are alike: which is shorter is then chance, and changes by the run."""
_MOST_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES


class GemmShape(NamedTuple):
    """One product in column-major terms: out[rows, columns] = first[rows, inner] · second."""

    rows: int
    columns: int
    inner: int
    transpose_a: bool
    transpose_b: bool


class _Proposal(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Prepared(NamedTuple):
    """What one call needs besides its operands."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    proposal: _Proposal


class CublasLt:
    """A handle of the library on one device, and the algorithm chosen for each product so far."""

    def __init__(
        self, library: ctypes.CDLL, device: torch.device, *, min_timing_ms: float = 0.0
    ) -> None:
        """`min_timing_ms` is how long a proposal runs each time it is timed; 0 runs it once."""
        self._library, self.min_timing_ms = library, min_timing_ms
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._chosen: dict[GemmShape, _Prepared] = {}
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def matmul(
        self, order: GemmShape, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the product into `out`; the first call with an order times the proposals."""
        prepared = self._chosen.get(order)
        if prepared is None:
            prepared = self._chosen[order] = self._fastest(order, first, second, out)
        self._run(prepared, first, second, out)

    def _run(
        self, prepared: _Prepared, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor
    ) -> None:
        of_first, of_second, of_out = prepared.layouts
        stream = torch.cuda.current_stream(out.device).cuda_stream
        self._call(
            "cublasLtMatmul",
            self._handle,
            prepared.description,
            ctypes.byref(self._one),
            ctypes.c_void_p(first.data_ptr()),
            of_first,
            ctypes.c_void_p(second.data_ptr()),
            of_second,
            ctypes.byref(self._zero),
            ctypes.c_void_p(out.data_ptr()),
            of_out,
            ctypes.c_void_p(out.data_ptr()),
            of_out,
            ctypes.byref(prepared.proposal),
            ctypes.c_void_p(self._scratch.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )

    def _fastest(
        self, order: GemmShape, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor
    ) -> _Prepared:
        candidates = self._proposed(order)
        if len(candidates) == 1 or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        times_ms: list[list[float]] = [[] for _ in candidates]
        # Rounds, rather than one candidate after the other: the clock drifts with the power drawn.
        for _ in range(1 + _ROUNDS):
            for candidate, taken in zip(candidates, times_ms, strict=True):
                # Long enough for the power limit to tell algorithms apart, once a time is known.
                count = max(1, round(self.min_timing_ms / taken[0])) if taken else 1
                start, end = _event(), _event()
                start.record()
                for _ in range(count):
                    self._run(candidate, first, second, out)
                end.record()
                end.synchronize()
                taken.append(start.elapsed_time(end) / count)
        return candidates[select_algorithm([taken[1:] for taken in times_ms])]

    def _proposed(self, order: GemmShape) -> list[_Prepared]:
        description = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(description), _COMPUTE_FP32, _FP32)
        for attribute, turned in (
            (_TURN_FIRST, order.transpose_a),
            (_TURN_SECOND, order.transpose_b),
        ):
            value = ctypes.c_int32(int(turned))
            self._call(
                "cublasLtMatmulDescSetAttribute",
                description,
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )
        rows, columns, inner = order.rows, order.columns, order.inner
        layouts = (
            self._layout(inner, rows) if order.transpose_a else self._layout(rows, inner),
            self._layout(columns, inner) if order.transpose_b else self._layout(inner, columns),
            self._layout(rows, columns),
        )
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        most = ctypes.c_size_t(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _MOST_WORKSPACE,
            ctypes.byref(most),
            ctypes.c_size_t(ctypes.sizeof(most)),
        )
        found, count = (_Proposal * _PROPOSALS)(), ctypes.c_int(0)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            description,
            *layouts,
            layouts[2],
            preference,
            _PROPOSALS,
            found,
            ctypes.byref(count),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        good = [each for each in found[: count.value] if each.state == 0]
        if not good:
            raise RuntimeError(f"cuBLASLt has no algorithm for {order}")
        return [_Prepared(description, layouts, each) for each in good]

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            _BF16,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            meaning = _STATUSES.get(status, "an unknown status")
            raise RuntimeError(f"{name} of cuBLASLt failed: {meaning} ({status})")


def select_algorithm(times_ms: Sequence[Sequence[float]]) -> int:
    """Return the first proposal whose median time is within a hundredth of the shortest.

    Proposals come in the order of the library's own estimate, so that near ties fall to the same
    one in every run.
    """
    medians = [median(taken) for taken in times_ms]
    limit = min(medians) * _NEAR
    return next(index for index, taken in enumerate(medians) if taken <= limit)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def open_cublaslt(device: torch.device) -> CublasLt | None:
    """Open the library that torch has loaded; None without an NVIDIA GPU or where it is absent."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major = torch.version.cuda.partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None
    with torch.cuda.device(device):
        return CublasLt(library, device)
