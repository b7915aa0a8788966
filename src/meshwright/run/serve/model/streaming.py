"""`Streaming`: which products of decoding steps run by `stream_linear`, rather than by the library.

Before steps are captured, both are timed for every kind of product that a model has and for some
numbers of rows, with the weights of several layers one after the other so that no cache hides the
memory, and each behind a kernel that lets the next one begin early, as all of ours do. What is not
clearly faster on this very device is left to the library. Two starts may choose differently, and
then differ in the last bit; an engine whose answers must not (`invariant`) has other products.

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

from meshwright.run.kernels.glu import glu
from meshwright.run.kernels.language import HAS_TRITON
from meshwright.run.kernels.products import TORCH, TorchProducts, flat
from meshwright.run.kernels.stream_linear import MOST_ROWS, can_stream, stream_glu, stream_linear
from meshwright.run.nn.attention import Attention
from meshwright.run.nn.block import Block
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.mlp import Mlp
from meshwright.spec.model.feedforward import Activation

LOG = logging.getLogger("meshwright.serve")
Kind = Literal["qkv", "o", "gate_up", "down"]
POINTS = (1, 16, 32, 64, 96, MOST_ROWS)
"""Numbers of rows that are timed; those between are treated as the next."""
LAYERS = 16
"""Layers whose weights are read in turn while a kind is timed."""
GAIN = 1.02
"""How much faster a kernel has to be, lest chance decides."""
_ROUNDS = 5
_HOPPER = (9, 0)


class Case(NamedTuple):
    """A kind of product, as all layers have it."""

    kind: Kind
    weights: tuple[Tensor, ...]
    activation: Activation | None = None


class Times(NamedTuple):
    """What a kind of product takes in one layer."""

    library_s: float
    ours_s: float

    @property
    def faster(self) -> bool:
        """Whether ours is, beyond chance."""
        return self.library_s > GAIN * self.ours_s


Clock = Callable[[Case, int], Times | None]
"""Times a case for a number of rows; None where the kernel does not run."""


class Streaming:
    """What was chosen for one model."""

    def __init__(self) -> None:
        self.chosen: dict[Kind, frozenset[int]] = {}
        """The points at which a kind is streamed."""
        self.times: dict[tuple[Kind, int], Times] = {}

    def choose(self, cases: Iterable[Case], rows: int, clock: Clock) -> None:
        """Time every case for all numbers of rows up to `rows`."""
        last = bisect_left(POINTS, rows)
        for case in cases:
            for point in POINTS[: last + 1]:
                times = clock(case, point)
                if times is None:
                    break
                self.times[case.kind, point] = times
            found = {point for kind, point in self.times if kind == case.kind}
            self.chosen[case.kind] = frozenset(
                point for point in found if self.times[case.kind, point].faster
            )

    def uses(self, kind: Kind, x_NK: Tensor, weight_MK: Tensor) -> bool:
        """Say whether this very product is to be streamed."""
        place = bisect_left(POINTS, len(x_NK))
        return (
            place < len(POINTS)
            and POINTS[place] in self.chosen.get(kind, ())
            and can_stream(x_NK, weight_MK)
        )


class StreamedProducts(TorchProducts):
    """The products of a linear layer, the forward one streamed where that is faster."""

    def __init__(self, streaming: Streaming, kind: Kind) -> None:
        self.streaming, self.kind = streaming, kind

    def forward(self, x_NK: Tensor, w_MK: Tensor) -> Tensor:
        """Return x · wᵀ."""
        if self.streaming.uses(self.kind, x_NK, w_MK):
            return stream_linear(x_NK, w_MK)
        return super().forward(x_NK, w_MK)


class StreamedGate:
    """The gated product of a feed-forward layer; `Mlp.in_one` calls it."""

    def __init__(self, streaming: Streaming, mlp: Mlp) -> None:
        self.streaming, self.layer = streaming, mlp.gate_up
        self.activation: Activation = mlp.activation

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the activated product, or None where two kernels shall make it."""
        layer, x_NK = self.layer, flat(x)
        if torch.is_grad_enabled():  # the kernel has no backward pass
            return None
        if not is_plain(layer) or not self.streaming.uses("gate_up", x_NK, layer.weight):
            return None
        y = stream_glu(x_NK, layer.weight, self.activation)
        return y.view(*x.shape[:-1], y.shape[1])


def stream(decoder: Decoder, rows: int, clock: Clock | None = None) -> Streaming:
    """Choose for a decoder that serves up to so many rows, and let it compute so from now on."""
    streaming = Streaming()
    device = decoder.embedding.weight.device
    if clock is None and not _can(device):
        return streaming
    cases = []
    for kind, layers in _layers(decoder).items():
        first = layers[0][0]
        alike = [layer for layer, _ in layers if layer.weight.shape == first.weight.shape]
        gated = kind == "gate_up"
        activation = layers[0][1].activation if gated and layers[0][1] is not None else None
        cases.append(Case(kind, tuple(layer.weight for layer in alike[:LAYERS]), activation))
        for layer, mlp in layers:
            if gated and mlp is not None:
                mlp.in_one = StreamedGate(streaming, mlp)
            elif not gated:
                layer.products = StreamedProducts(streaming, kind)
    streaming.choose(cases, rows, clock or time_case)
    return streaming


def is_plain(layer: Linear) -> bool:
    """Say whether a layer is one product with a weight in bfloat16, and nothing else."""
    return (
        layer.low_precision is None
        and layer.across is None
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


def _layers(decoder: Decoder) -> dict[Kind, list[tuple[Linear, Mlp | None]]]:
    """Return the layers of each kind that may be streamed."""
    found: dict[Kind, list[tuple[Linear, Mlp | None]]] = {}

    def note(kind: Kind, layer: Linear, mlp: Mlp | None = None) -> None:
        if is_plain(layer) and layer.products is TORCH:
            found.setdefault(kind, []).append((layer, mlp))

    for block in decoder.layers:
        assert isinstance(block, Block)
        if isinstance(block.mixer, Attention):
            note("qkv", block.mixer.qkv)
            note("o", block.mixer.o)
        if isinstance(block.mlp, Mlp):
            note("down", block.mlp.down)
            if block.mlp.gated and block.mlp.passage is None:
                note("gate_up", block.mlp.gate_up, block.mlp)
    return found


@torch.no_grad()
def time_case(case: Case, rows: int) -> Times | None:
    """Time a case on its GPU, by the library and streamed, turn by turn."""
    from triton.runtime.errors import TritonError

    weight = case.weights[0]
    before = torch.randn(rows, 2 * weight.shape[1], device=weight.device).to(weight.dtype)
    if not can_stream(glu(before, "silu"), weight):
        return None

    def library(weight: Tensor) -> Tensor:
        y = TORCH.forward(glu(before, "silu"), weight)
        return y if case.activation is None else glu(y, case.activation)

    def ours(weight: Tensor) -> Tensor:
        x = glu(before, "silu")
        if case.activation is None:
            return stream_linear(x, weight)
        return stream_glu(x, weight, case.activation)

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
    return Times(*(median(times[1:]) for times in taken))


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
