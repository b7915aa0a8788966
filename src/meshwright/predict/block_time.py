"""Time of one block for one microbatch on one rank: its kernels, and the communication between.

Compute is listed kernel by kernel from the block's weights, so tensor and expert parallelism
show as smaller products. Communication is returned beside it; what of it hides is decided by the
step. Pipelines, data parallelism and the optimizer are not known here.
"""

from typing import NamedTuple

from meshwright.predict.cost import (
    DeviceCosts,
    attention_s,
    bytes_moved,
    grouped_matmul_s,
    linear_s,
    memory_s,
    unfused_attention_s,
)
from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.run import Run
from meshwright.spec.model import (
    Attention,
    Block,
    Experts,
    GatedDelta,
    LatentAttention,
    Mamba2,
    Mlp,
    Weight,
)


class Passes(NamedTuple):
    """Seconds of the three parts of training one block on one microbatch."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    kernels: int = 0
    """Kernels of one forward pass; backward launches about twice as many."""

    def __add__(self, other: object) -> "Passes":
        if not isinstance(other, Passes):
            return NotImplemented
        return Passes(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.kernels + other.kernels,
        )

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input_gradient + self.weight_gradient


def block_passes(run: Run, block: Block) -> Passes:
    """Return the compute time of a block, without communication and recompute."""
    hidden = run.model.hidden
    total = Passes()
    if block.mixer is not None:
        total += _around(run)
        total += _products(run, block.mixer.weights(hidden))
        total += core_passes(run, block)
    if isinstance(block.mlp, Mlp):
        total += _around(run)
        total += _products(run, block.mlp.weights(hidden))
        width = block.mlp.width / run.layout.tp * run.tokens
        total += _activation(run.costs, width, block.mlp.gated)
    elif isinstance(block.mlp, Experts):
        total += _around(run)
        total += _experts(run, block.mlp)
    return total._replace(weight_gradient=0.0) if run.frozen else total


def _moved(costs: DeviceCosts, op: MemoryOp, elements: float) -> float:
    return memory_s(costs, op, bytes_moved(op, elements))


def _around(run: Run) -> Passes:
    """Norm before a part and residual after it."""
    costs, elements = run.costs, float(run.local_tokens * run.model.hidden)
    forward = _moved(costs, "norm", elements) + _moved(costs, "residual", elements)
    backward = _moved(costs, "norm_backward", elements) + _moved(costs, "residual", elements)
    return Passes(forward, backward, 0.0, 2)


def _fused(weights: tuple[Weight, ...], tp: int) -> list[tuple[int, int, Weight]]:
    """Return outputs and inputs of each product on one rank, those with one input together."""
    found: list[tuple[int, int, Weight]] = []
    joined = {"k": "q", "v": "q", "up": "gate", "shared_up": "shared_gate"}
    for weight in weights:
        if weight.part in ("expert", "router"):
            continue
        shards = weight.shards(tp)
        out = weight.fan_out // shards if weight.split == "column" else weight.fan_out
        into = weight.fan_in // shards if weight.split == "row" else weight.fan_in
        partner = joined.get(weight.name)
        if partner and found and found[-1][2].name == partner:
            found[-1] = (found[-1][0] + out, into, found[-1][2])
        else:
            found.append((out, into, weight))
    return found


def _products(run: Run, weights: tuple[Weight, ...]) -> Passes:
    costs, layout = run.costs, run.layout
    total = Passes()
    low = layout.precision.startswith(("fp8", "mxfp8", "nvfp4"))
    for out, into, weight in _fused(weights, layout.tp):
        tokens = run.local_tokens if weight.split == "none" else run.tokens
        precision = layout.precision
        forward = linear_s(costs, tokens, out, into, precision)
        inputs = linear_s(costs, tokens, out, into, precision, part="input_gradient")
        gradient = linear_s(costs, tokens, out, into, precision, part="weight_gradient")
        kernels = 1
        if low:
            # Inputs are quantised forward, output gradients backward, each for two products.
            forward += _moved(costs, "quantise", float(tokens * into))
            inputs += _moved(costs, "quantise", float(tokens * out))
            kernels += 1
        total += Passes(forward, inputs, gradient, kernels)
    return total


def core_passes(run: Run, block: Block) -> Passes:
    """Return the time of what lies between a mixer's products: attention, or a scan."""
    layout, mixer = run.layout, block.mixer
    match mixer:
        case Attention() | LatentAttention():
            return _attention(run, mixer)
        case GatedDelta() | Mamba2():
            # Chunked scans run as batched products at a modest share of the peak; their traffic
            # (inputs, states and outputs of every chunk) adds to it.
            flops = mixer.core_flops(run.length) * run.tokens / layout.tp
            width = sum(w.fan_out for w in mixer.weights(1) if w.split == "column")
            traffic = _moved(run.costs, "copy", 2.0 * width * run.tokens / layout.tp)
            forward = flops / (SCAN_EFFICIENCY * run.costs.attention_peak_flops) + traffic
            return Passes(forward, 2.5 * forward, 0.0, 8)
    return Passes()


SCAN_EFFICIENCY = 0.25
"""Share of the bf16 peak that chunked state-space scans reach (assumed; Mamba-2's paper, §9)."""


def _attention(run: Run, mixer: Attention | LatentAttention) -> Passes:
    costs, layout, kernel = run.costs, run.layout, run.software.attention
    heads = max(1, mixer.heads // layout.tp)
    window = None
    if isinstance(mixer, Attention):
        kv_heads = max(1, mixer.kv_heads // layout.tp)
        head_dim, value_dim = mixer.head_dim, mixer.head_dim
        window = mixer.window or mixer.chunk
    else:
        kv_heads, head_dim = heads, mixer.nope_dim + mixer.rope_dim
        value_dim = mixer.value_dim
    # Under context parallelism each rank does a balanced share of the whole triangle.
    share = 1.0 / layout.cp
    rotary = float(run.tokens * (heads + kv_heads) * head_dim)
    turn = _moved(costs, "rotary", rotary) if mixer.rotary is not None else 0.0
    times = []
    for part in ("forward", "backward"):
        if kernel is None:
            seconds = unfused_attention_s(
                costs, batch=layout.microbatch, heads=heads, head_dim=head_dim, seq=run.length,
                part=part, precision="bf16",
            )  # fmt: skip
        else:
            seconds = attention_s(
                costs, batch=layout.microbatch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                seq=run.length, value_dim=value_dim, window=window, part=part, kernel=kernel,
            )  # fmt: skip
        times.append(share * seconds + turn)
    return Passes(times[0], times[1], 0.0, 2)


def _activation(costs: DeviceCosts, width: float, gated: bool) -> Passes:
    elements = width * (2 if gated else 1)
    forward = _moved(costs, "activation", elements)
    return Passes(forward, _moved(costs, "activation_backward", elements), 0.0, 1)


def _experts(run: Run, experts: Experts) -> Passes:
    """Router, permutation, grouped products, activation, and the shared experts beside them."""
    costs, layout, hidden = run.costs, run.layout, run.model.hidden
    total = _products(run, experts.weights(hidden))
    width = experts.latent or hidden
    etp = layout.experts_tp
    routed = run.tokens * experts.top_k * etp / layout.tp
    local = max(1, experts.count // layout.ep)
    each = routed / local
    inner = experts.width // etp
    wide = inner * (2 if experts.gated else 1)
    precision = layout.precision
    for out, into in ((wide, width), (width, inner)):
        total += Passes(
            grouped_matmul_s(costs, local, each, out, into, precision=precision),
            grouped_matmul_s(
                costs, local, each, out, into, precision=precision, part="input_gradient"
            ),
            grouped_matmul_s(
                costs, local, each, out, into, precision=precision, part="weight_gradient"
            ),
            1,
        )
    total += _activation(costs, inner * routed, experts.gated)
    if experts.shared_width:
        total += _activation(costs, experts.shared_width / layout.tp * run.tokens, experts.gated)
    router = linear_s(costs, run.local_tokens, experts.count, hidden, "bf16")
    scores = _moved(costs, "softmax", float(run.local_tokens * experts.count * 2))
    moved = float(run.tokens * experts.top_k * width / layout.tp)
    # Tokens are permuted by expert before the exchange and again by local expert after it.
    permute = 2 * _moved(costs, "permute", moved) + 2 * _moved(costs, "unpermute", moved)
    total += Passes(router + scores + permute, 2 * router + scores + permute, 0.0, 10)
    return total
