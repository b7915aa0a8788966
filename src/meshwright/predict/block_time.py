"""Time of one block for one microbatch on one rank: its kernels, by what kind of work they do.

Compute is listed kernel by kernel from the block's weights, so tensor and expert parallelism
show as smaller products. Communication, pipelines, data parallelism and the optimizer are not known
here.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.predict.adapters import adapter_passes, expert_adapter_passes
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
from meshwright.predict.cost.matmul import LinearPart
from meshwright.predict.network.constants import sm_number
from meshwright.predict.products import dense_products
from meshwright.predict.run import Run
from meshwright.predict.terms import Term
from meshwright.spec.layout.states import STATE_BYTES
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
    split: float = 0.0
    """How much longer a backward takes in two parts than in one."""

    def __add__(self, other: object) -> "Passes":
        if not isinstance(other, Passes):
            return NotImplemented
        return Passes(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.kernels + other.kernels,
            self.split + other.split,
        )

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input_gradient + self.weight_gradient


Part = tuple[Term, Passes]
"""Kernels of one kind of work."""


def total(parts: Iterable[Part]) -> Passes:
    """Return the time of all of some parts."""
    return sum((passes for _, passes in parts), Passes())


def block_passes(run: Run, block: Block) -> Passes:
    """Return the compute time of a block, without communication and recompute."""
    return total(block_parts(run, block))


def block_parts(run: Run, block: Block) -> Iterator[Part]:
    """List the kernels of a block, without communication and recompute."""
    hidden = run.model.hidden
    if block.mixer is not None:
        yield "norms", _around(run)
        yield from product_parts(run, block.mixer.weights(hidden))
        yield from core_parts(run, block)
    if isinstance(block.mlp, Mlp):
        yield "norms", _around(run)
        yield from product_parts(run, block.mlp.weights(hidden))
        width = block.mlp.width / run.layout.tp * run.tokens
        yield "activations", activation_passes(run.costs, width, block.mlp.gated)
    elif isinstance(block.mlp, Experts):
        yield "norms", _around(run)
        yield from expert_parts(run, block.mlp)


def moved_s(costs: DeviceCosts, op: MemoryOp, elements: float) -> float:
    """Return the time of one pass of a kind over so many numbers."""
    return memory_s(costs, op, bytes_moved(op, elements))


def _around(run: Run) -> Passes:
    """Norm before a part and residual after it."""
    costs, elements = run.costs, float(run.local_tokens * run.model.hidden)
    if run.software.norm_adds:
        # Stream and branch are read, sum and norm written; backward the same the other way.
        both = 4 * 2.0 * elements
        forward, backward = (memory_s(costs, op, both) for op in ("norm", "norm_backward"))
        return Passes(forward, backward, 0.0, 1)
    forward = moved_s(costs, "norm", elements) + moved_s(costs, "residual", elements)
    backward = moved_s(costs, "norm_backward", elements) + moved_s(costs, "residual", elements)
    return Passes(forward, backward, 0.0, 2)


def product_passes(run: Run, weights: tuple[Weight, ...]) -> Passes:
    """Return the time of some weights' products and of their adapters, routed experts apart."""
    return total(product_parts(run, weights))


def product_parts(run: Run, weights: tuple[Weight, ...]) -> Iterator[Part]:
    """List some weights' products, casts before them, and their adapters, routed experts apart."""
    costs, layout = run.costs, run.layout
    products, cast = Passes(), Passes()
    casts = cast_passes(run)
    for out, into, weight in dense_products(weights, layout.tp):
        tokens = run.local_tokens if weight.split == "none" else run.tokens
        precision = layout.precision
        forward = linear_s(costs, tokens, out, into, precision)
        inputs = linear_s(costs, tokens, out, into, precision, part="input_gradient")
        gradient = 0.0
        if not run.frozen:
            gradient = linear_s(costs, tokens, out, into, precision, part="weight_gradient")
            gradient += accumulation_s(run, out * into)
        products += Passes(forward, inputs, gradient, 1)
        if casts:
            # Inputs are quantised forward, output gradients backward, each for two products;
            # weights once a step, which its microbatches share.
            kept = out * into / run.microbatches if run.software.casts_weights else 0.0
            cast += Passes(
                casts * moved_s(costs, "quantise", tokens * into + kept),
                casts * moved_s(costs, "quantise", float(tokens * out)),
                0.0,
                1,
            )
    if run.frozen:
        products += Passes(*adapter_passes(run, weights))
    yield "products", products
    if casts:
        yield "casts", cast


def accumulation_s(run: Run, weights: int) -> float:
    """Return what adding gradients into their buffer takes where no product does it on the way."""
    if run.software.fused_accumulation or run.layout.zero == 3 or run.microbatches == 1:
        return 0.0
    # Reads the new gradient, and reads and writes the buffer.
    buffer = STATE_BYTES[run.layout.gradient_precision]
    return memory_s(run.costs, "accumulate", float(weights * (2 + 2 * buffer)))


def cast_passes(run: Run) -> float:
    """Return what quantising a tensor for two products moves, over reading two bytes, writing one.

    A scale of a whole tensor or row needs its maximum first, unless it is taken from the step
    before; blocks find theirs on the way. Hopper's products want a transposed copy, and blocks
    run along either side.
    """
    precision = run.layout.precision
    if precision in ("mxfp8", "nvfp4", "fp8-blockwise"):
        return (2 + 1 + 1) / 3
    if not precision.startswith("fp8"):
        return 0.0
    search = 0 if run.software.delayed_scaling else 2
    transposed = 1 if (sm_number(run.cluster.gpu.arch) or 90) < 100 else 0
    return (search + 2 + 1 + transposed) / 3


def core_passes(run: Run, block: Block) -> Passes:
    """Return the time of what lies between a mixer's products: attention, or a scan."""
    return total(core_parts(run, block))


def core_parts(run: Run, block: Block) -> Iterator[Part]:
    """List what lies between a mixer's products: attention, or a scan."""
    layout, mixer = run.layout, block.mixer
    match mixer:
        case Attention() | LatentAttention():
            yield from _attention(run, mixer)
        case GatedDelta() | Mamba2():
            # Chunked scans run as batched products at a modest share of the peak; their traffic
            # (inputs, states and outputs of every chunk) adds to it.
            flops = mixer.core_flops(run.length) * run.tokens / layout.tp
            width = sum(w.fan_out for w in mixer.weights(1) if w.split == "column")
            traffic = moved_s(run.costs, "copy", 2.0 * width * run.tokens / layout.tp)
            rate = run.constants.scan_efficiency * run.costs.attention_peak_flops
            forward = flops / rate + traffic
            yield "attention", Passes(forward, 2.5 * forward, 0.0, 8)


def _attention(run: Run, mixer: Attention | LatentAttention) -> Iterator[Part]:
    costs, layout, software = run.costs, run.layout, run.software.attention
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
    turn = moved_s(costs, "rotary", rotary)
    times = []
    for part in ("forward", "backward"):
        if software == "unfused":
            seconds = unfused_attention_s(
                costs, batch=layout.microbatch, heads=heads, head_dim=head_dim, seq=run.length,
                part=part, precision="bf16",
            )  # fmt: skip
        else:
            seconds = attention_s(
                costs, batch=layout.microbatch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                seq=run.length, value_dim=value_dim, window=window, part=part,
                kernel="native" if software == "native" else "flash2",
            )  # fmt: skip
        times.append(share * seconds)
    yield "attention", Passes(times[0], times[1], 0.0, 1)
    if mixer.rotary is not None:
        yield "rotary", Passes(turn, turn, 0.0, 1)


def _expert_biases(run: Run, first: float, second: float) -> Passes:
    """Biases that grouped products do not add, and an activation that no kernel fuses with them."""
    added = moved_s(run.costs, "residual", first) + moved_s(run.costs, "residual", second)
    apart = 2 * moved_s(run.costs, "copy", first)
    return Passes(added + apart, added + 2 * apart, 0.0, 6)


def _casts(run: Run, *elements: float) -> Passes:
    """Quantising what the experts' products read: two inputs forward, two gradients backward."""
    passes = cast_passes(run)
    first, second, third = (passes * moved_s(run.costs, "quantise", count) for count in elements)
    return Passes(first + second, first + third, 0.0, 2 if passes else 0)


def activation_passes(costs: DeviceCosts, width: float, gated: bool) -> Passes:
    """Return the time of the activation over so many numbers."""
    elements = width * (2 if gated else 1)
    forward = moved_s(costs, "activation", elements)
    return Passes(forward, moved_s(costs, "activation_backward", elements), 0.0, 1)


def expert_passes(run: Run, experts: Experts) -> Passes:
    """Return the time of a layer of experts, the exchange between ranks left out."""
    return total(expert_parts(run, experts))


def expert_parts(run: Run, experts: Experts) -> Iterator[Part]:
    """List router, permutation, grouped products, activation, and the shared experts beside."""
    costs, layout, hidden = run.costs, run.layout, run.model.hidden
    yield from product_parts(run, experts.weights(hidden))
    width = experts.latent or hidden
    etp, load = layout.experts_tp, run.expert_load(experts)
    # The busiest rank sets the pace; its tokens spread evenly over its experts.
    routed = run.tokens * experts.top_k * etp / layout.tp * load
    inner = experts.width // etp
    wide = inner * (2 if experts.gated else 1)
    yield "grouped products", _grouped(run, experts, routed, ((wide, width), (width, inner)))
    if run.frozen:
        yield "grouped products", Passes(*expert_adapter_passes(run, experts, routed))
    plain = experts.gated and experts.activation == "silu" and not experts.bias
    fused = run.software.fused_experts and plain
    if not fused:
        yield "activations", activation_passes(costs, inner * routed, experts.gated)
        if experts.bias:
            yield "activations", _expert_biases(run, routed * wide, routed * width)
        yield "casts", _casts(run, routed * width, routed * inner, routed * wide)
    if experts.shared_width:
        shared = experts.shared_width / layout.tp * run.tokens
        yield "activations", activation_passes(costs, shared, experts.gated)
    router = linear_s(costs, run.local_tokens, experts.count, hidden, "bf16")
    scores = moved_s(costs, "softmax", float(run.local_tokens * experts.count * 2))
    moved = float(run.tokens * experts.top_k * width / layout.tp)
    permute = moved_s(costs, "permute", moved) + moved_s(costs, "unpermute", moved)
    if fused:
        permute = 0.0
    elif run.software.dispatcher == "pairwise" and not (
        run.software.one_permute and layout.ep == 1
    ):
        # Copies are sorted by rank before the exchange, and by local expert after it.
        permute *= 1 + load
    else:
        permute *= load
    gradients = 1 if run.frozen else 2
    back = gradients * router + scores + permute
    yield "routing", Passes(router + scores + permute, back, 0.0, 10)


def _grouped(
    run: Run, experts: Experts, routed: float, shapes: tuple[tuple[int, int], ...]
) -> Passes:
    local = max(1, experts.count // run.layout.ep)
    each, precision = routed / local, run.layout.precision
    if run.software.wide_experts:
        precision = "bf16"

    def product_s(out: int, into: int, part: LinearPart) -> float:
        return grouped_matmul_s(run.costs, local, each, out, into, precision=precision, part=part)

    found = Passes()
    for out, into in shapes:
        weights = 0.0 if run.frozen else product_s(out, into, "weight_gradient")
        found += Passes(
            product_s(out, into, "forward"), product_s(out, into, "input_gradient"), weights, 1
        )
    return found
