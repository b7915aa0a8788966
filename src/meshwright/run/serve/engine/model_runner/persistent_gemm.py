"""`PersistentGemmSelection`: the GEMMs of decode steps that run by `skinny_linear`.

Before steps are captured, both are timed for every kind of product that a model has and for some
numbers of rows, with the weights of several layers one after the other so that no cache hides the
memory, and each behind a kernel that lets the next one begin early, as all of ours do. What is not
clearly faster on this very device is left to the library. Two starts may choose differently, and
then differ in the last bit; an engine whose answers must not (`batch_invariant`) has others.

Products with a bias, in other formats than bfloat16, with adapters, and gated ones that ranks
share stay as they are.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.activation.glu import glu
from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, TorchGemm, view_as_matrix
from meshwright.run.kernels.gemm.skinny_gemm import (
    MAX_ROWS,
    is_skinny_gemm_supported,
    skinny_glu,
    skinny_linear,
)
from meshwright.run.kernels.triton_compat import HAS_TRITON
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.mlp import MLPLayer
from meshwright.spec.model.feedforward import Activation

LOG = logging.getLogger("meshwright.serve")
GemmKind = Literal["qkv", "o", "gate_up", "down"]
TIMED_ROWS = (1, 16, 32, 64, 96, MAX_ROWS)
"""Numbers of rows that are timed; those between are treated as the next."""
TIMED_LAYERS = 16
"""Layers whose weights are read in turn while a kind is timed."""
MIN_SPEEDUP = 1.02
"""How much faster a kernel has to be, lest chance decides."""
_ROUNDS = 5
_HOPPER = (9, 0)


class GemmCase(NamedTuple):
    """A kind of product, as all layers have it."""

    kind: GemmKind
    weights: tuple[Tensor, ...]
    activation: Activation | None = None


class GemmTimes(NamedTuple):
    """What a kind of product takes in one layer."""

    library_s: float
    persistent_s: float

    @property
    def is_persistent_faster(self) -> bool:
        """Whether ours is, beyond chance."""
        return self.library_s > MIN_SPEEDUP * self.persistent_s


GemmClock = Callable[[GemmCase, int], GemmTimes | None]
"""Times a case for a number of rows; None where the kernel does not run."""


class PersistentGemmSelection:
    """What was chosen for one model."""

    def __init__(self) -> None:
        self.selected_rows: dict[GemmKind, frozenset[int]] = {}
        """The points at which a kind is streamed."""
        self.times: dict[tuple[GemmKind, int], GemmTimes] = {}

    def select(self, cases: Iterable[GemmCase], rows: int, clock: GemmClock) -> None:
        """Time every case for all numbers of rows up to `rows`."""
        last = bisect_left(TIMED_ROWS, rows)
        for case in cases:
            for point in TIMED_ROWS[: last + 1]:
                times = clock(case, point)
                if times is None:
                    break
                self.times[case.kind, point] = times
            found = {point for kind, point in self.times if kind == case.kind}
            self.selected_rows[case.kind] = frozenset(
                point for point in found if self.times[case.kind, point].is_persistent_faster
            )

    def is_selected(self, kind: GemmKind, x_NK: Tensor, weight_MK: Tensor) -> bool:
        """Say whether this very product is to be streamed."""
        place = bisect_left(TIMED_ROWS, len(x_NK))
        return (
            place < len(TIMED_ROWS)
            and TIMED_ROWS[place] in self.selected_rows.get(kind, ())
            and is_skinny_gemm_supported(x_NK, weight_MK)
        )


class PersistentGemm(TorchGemm):
    """The products of a linear layer, the forward one streamed where that is faster."""

    def __init__(self, selection: PersistentGemmSelection, kind: GemmKind) -> None:
        self.selection, self.kind = selection, kind

    def forward(self, x_NK: Tensor, w_MK: Tensor) -> Tensor:
        """Return x · wᵀ."""
        if self.selection.is_selected(self.kind, x_NK, w_MK):
            return skinny_linear(x_NK, w_MK)
        return super().forward(x_NK, w_MK)


class PersistentGatedGemm:
    """The gated product of a feed-forward layer; `MLPLayer.fused_gate_up` holds it."""

    def __init__(self, selection: PersistentGemmSelection, mlp: MLPLayer) -> None:
        self.selection, self.layer = selection, mlp.gate_up
        self.activation: Activation = mlp.activation

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the activated product, or None where two kernels shall make it."""
        layer, x_NK = self.layer, view_as_matrix(x)
        if torch.is_grad_enabled():  # the kernel has no backward pass
            return None
        if not is_bf16_linear(layer) or not self.selection.is_selected(
            "gate_up", x_NK, layer.weight
        ):
            return None
        y = skinny_glu(x_NK, layer.weight, self.activation)
        return y.view(*x.shape[:-1], y.shape[1])


def enable_persistent_gemm(
    decoder: Decoder, rows: int, clock: GemmClock | None = None
) -> PersistentGemmSelection:
    """Choose for a decoder that serves up to so many rows, and let it compute so from now on."""
    streaming = PersistentGemmSelection()
    device = decoder.embedding.weight.device
    if clock is None and not _can(device):
        return streaming
    cases = []
    for kind, layers in _layers(decoder).items():
        first = layers[0][0]
        alike = [layer for layer, _ in layers if layer.weight.shape == first.weight.shape]
        gated = kind == "gate_up"
        activation = layers[0][1].activation if gated and layers[0][1] is not None else None
        cases.append(
            GemmCase(kind, tuple(layer.weight for layer in alike[:TIMED_LAYERS]), activation)
        )
        for layer, mlp in layers:
            if gated and mlp is not None:
                mlp.fused_gate_up = PersistentGatedGemm(streaming, mlp)
            elif not gated:
                layer.gemm = PersistentGemm(streaming, kind)
    streaming.select(cases, rows, clock or time_gemm)
    return streaming


def is_bf16_linear(layer: Linear) -> bool:
    """Say whether a layer is one product with a weight in bfloat16, and nothing else."""
    return (
        layer.linear_method is None
        and layer.tp_overlap is None
        and layer.bias is None
        and layer.weight.dtype == torch.bfloat16
    )


def _can(device: torch.device) -> bool:
    """Say whether a device has what the kernel is made of."""
    return (
        HAS_TRITON
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) == _HOPPER
    )


def _layers(decoder: Decoder) -> dict[GemmKind, list[tuple[Linear, MLPLayer | None]]]:
    """Return the layers of each kind that may be streamed."""
    found: dict[GemmKind, list[tuple[Linear, MLPLayer | None]]] = {}

    def note(kind: GemmKind, layer: Linear, mlp: MLPLayer | None = None) -> None:
        if is_bf16_linear(layer) and layer.gemm is TORCH_GEMM:
            found.setdefault(kind, []).append((layer, mlp))

    for block in decoder.layers:
        assert isinstance(block, DecoderLayer)
        if isinstance(block.mixer, SelfAttention):
            note("qkv", block.mixer.qkv)
            note("o", block.mixer.o)
        if isinstance(block.mlp, MLPLayer):
            note("down", block.mlp.down)
            if block.mlp.is_gated and block.mlp.parallel_hooks is None:
                note("gate_up", block.mlp.gate_up, block.mlp)
    return found


@torch.no_grad()
def time_gemm(case: GemmCase, rows: int) -> GemmTimes | None:
    """Time a case on its GPU, by the library and streamed, turn by turn."""
    from triton.runtime.errors import TritonError

    weight = case.weights[0]
    before = torch.randn(rows, 2 * weight.shape[1], device=weight.device).to(weight.dtype)
    if not is_skinny_gemm_supported(glu(before, "silu"), weight):
        return None

    def library(weight: Tensor) -> Tensor:
        y = TORCH_GEMM.forward(glu(before, "silu"), weight)
        return y if case.activation is None else glu(y, case.activation)

    def ours(weight: Tensor) -> Tensor:
        x = glu(before, "silu")
        if case.activation is None:
            return skinny_linear(x, weight)
        return skinny_glu(x, weight, case.activation)

    try:
        graphs = [_captured(way, case.weights) for way in (library, ours)]
    except (RuntimeError, TritonError, ImportError, AttributeError, TypeError) as error:
        # Such tiles do not fit here, or this Triton names things otherwise.
        LOG.warning("%s of %d rows is left to the library: %s", case.kind, rows, error)
        return None
    taken: list[list[float]] = [[], []]
    for _ in range(1 + _ROUNDS):
        for graph, times in zip(graphs, taken, strict=True):
            times.append(_replay_s(graph) / len(case.weights))
    return GemmTimes(*(median(times[1:]) for times in taken))


def _captured(way: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    way(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            way(weight)
    return graph


def _replay_s(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
