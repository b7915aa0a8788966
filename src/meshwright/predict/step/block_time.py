"""Time of one block for one microbatch on one rank: its kernels, by what kind of work they do.

Compute is listed kernel by kernel from the block's weights, so tensor and expert parallelism
show as smaller products. Communication, pipelines, data parallelism and the optimizer are not known
here.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.predict.cost import (
    DeviceCosts,
    attention_s,
    bytes_moved,
    grouped_gemm_s,
    linear_s,
    memory_s,
    unfused_attention_s,
)
from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.gemm import LinearPart
from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.predict.step.kernel_kinds import KernelKind
from meshwright.predict.step.lora_time import expert_lora_passes, lora_passes
from meshwright.predict.training_run.gemm_shapes import list_dense_gemms
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    MoESpec,
    Weight,
)


class PassTimes(NamedTuple):
    """Seconds of the three parts of training one block on one microbatch."""

    forward_s: float = 0.0
    dgrad_s: float = 0.0
    wgrad_s: float = 0.0
    kernels: int = 0
    """Kernels of one forward pass; backward launches about twice as many."""
    split_penalty_s: float = 0.0
    """How much longer a backward takes in two parts than in one."""

    def __add__(self, other: object) -> "PassTimes":
        if not isinstance(other, PassTimes):
            return NotImplemented
        return PassTimes(
            self.forward_s + other.forward_s,
            self.dgrad_s + other.dgrad_s,
            self.wgrad_s + other.wgrad_s,
            self.kernels + other.kernels,
            self.split_penalty_s + other.split_penalty_s,
        )

    @property
    def backward_s(self) -> float:
        """Both gradients."""
        return self.dgrad_s + self.wgrad_s


KernelTimes = tuple[KernelKind, PassTimes]
"""Kernels of one kind of work."""


def sum_passes(parts: Iterable[KernelTimes]) -> PassTimes:
    """Return the time of all of some parts."""
    return sum((passes for _, passes in parts), PassTimes())


def block_passes(run: TrainingRun, block: BlockSpec) -> PassTimes:
    """Return the compute time of a block, without communication and recompute."""
    return sum_passes(list_block_kernels(run, block))


def list_block_kernels(run: TrainingRun, block: BlockSpec) -> Iterator[KernelTimes]:
    """List the kernels of a block, without communication and recompute."""
    hidden = run.model.hidden
    if block.mixer is not None:
        yield "norms", _around(run)
        yield from list_gemm_kernels(run, block.mixer.list_weights(hidden))
        yield from list_attention_kernels(run, block)
    if isinstance(block.mlp, MLPSpec):
        yield "norms", _around(run)
        yield from list_gemm_kernels(run, block.mlp.list_weights(hidden))
        width = block.mlp.width / run.layout.tp * run.microbatch_tokens
        yield "activations", activation_passes(run.device_costs, width, block.mlp.gated)
    elif isinstance(block.mlp, MoESpec):
        yield "norms", _around(run)
        yield from list_expert_kernels(run, block.mlp)


def elementwise_s(costs: DeviceCosts, op: MemoryOp, elements: float) -> float:
    """Return the time of one pass of a kind over so many numbers."""
    return memory_s(costs, op, bytes_moved(op, elements))


def _around(run: TrainingRun) -> PassTimes:
    """Norm before a part and residual after it."""
    costs, elements = run.device_costs, float(run.local_tokens * run.model.hidden)
    if run.framework.fused_residual_norm:
        # Stream and branch are read, sum and norm written; backward the same the other way.
        both = 4 * 2.0 * elements
        forward, backward = (memory_s(costs, op, both) for op in ("norm", "norm_backward"))
        return PassTimes(forward, backward, 0.0, 1)
    forward = elementwise_s(costs, "norm", elements) + elementwise_s(costs, "residual", elements)
    backward = elementwise_s(costs, "norm_backward", elements) + elementwise_s(
        costs, "residual", elements
    )
    return PassTimes(forward, backward, 0.0, 2)


def gemm_passes(run: TrainingRun, weights: tuple[Weight, ...]) -> PassTimes:
    """Return the time of some weights' products and of their adapters, routed experts apart."""
    return sum_passes(list_gemm_kernels(run, weights))


def list_gemm_kernels(run: TrainingRun, weights: tuple[Weight, ...]) -> Iterator[KernelTimes]:
    """List some weights' products, casts before them, and their adapters, routed experts apart."""
    costs, layout = run.device_costs, run.layout
    products, cast = PassTimes(), PassTimes()
    casts = cast_passes(run)
    for out, into, weight in list_dense_gemms(weights, layout.tp):
        tokens = run.local_tokens if weight.split == "none" else run.microbatch_tokens
        precision = layout.precision
        forward = linear_s(costs, tokens, out, into, precision)
        inputs = linear_s(costs, tokens, out, into, precision, part="input_gradient")
        gradient = 0.0
        if not run.frozen:
            gradient = linear_s(costs, tokens, out, into, precision, part="weight_gradient")
            gradient += accumulation_s(run, out * into)
        products += PassTimes(forward, inputs, gradient, 1)
        if casts:
            # Inputs are quantised forward, output gradients backward, each for two products;
            # weights once a step, which its microbatches share.
            kept = (
                out * into / run.num_microbatches if run.framework.casts_weights_each_step else 0.0
            )
            cast += PassTimes(
                casts * elementwise_s(costs, "quantise", tokens * into + kept),
                casts * elementwise_s(costs, "quantise", float(tokens * out)),
                0.0,
                1,
            )
    if run.frozen:
        products += PassTimes(*lora_passes(run, weights))
    yield "gemm", products
    if casts:
        yield "casts", cast


def accumulation_s(run: TrainingRun, weights: int) -> float:
    """Return what adding gradients into their buffer takes where no product does it on the way."""
    if run.framework.fused_accumulation or run.layout.zero == 3 or run.num_microbatches == 1:
        return 0.0
    # Reads the new gradient, and reads and writes the buffer.
    buffer = BYTES_PER_ELEMENT[run.layout.gradient_precision]
    return memory_s(run.device_costs, "accumulate", float(weights * (2 + 2 * buffer)))


def cast_passes(run: TrainingRun) -> float:
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
    search = 0 if run.framework.delayed_scaling else 2
    transposed = 1 if (parse_sm(run.cluster.gpu.arch) or 90) < 100 else 0
    return (search + 2 + 1 + transposed) / 3


def attention_passes(run: TrainingRun, block: BlockSpec) -> PassTimes:
    """Return the time of what lies between a mixer's products: attention, or a scan."""
    return sum_passes(list_attention_kernels(run, block))


def list_attention_kernels(run: TrainingRun, block: BlockSpec) -> Iterator[KernelTimes]:
    """List what lies between a mixer's products: attention, or a scan."""
    layout, mixer = run.layout, block.mixer
    match mixer:
        case AttentionSpec() | LatentAttentionSpec():
            yield from _attention(run, mixer)
        case GatedDeltaNetSpec() | Mamba2Spec():
            # Chunked scans run as batched products at a modest share of the peak; their traffic
            # (inputs, states and outputs of every chunk) adds to it.
            flops = mixer.core_flops(run.sequence_length) * run.microbatch_tokens / layout.tp
            width = sum(w.fan_out for w in mixer.list_weights(1) if w.split == "column")
            traffic = elementwise_s(
                run.device_costs, "copy", 2.0 * width * run.microbatch_tokens / layout.tp
            )
            rate = run.constants.scan_efficiency * run.device_costs.attention_peak_flops
            forward = flops / rate + traffic
            yield "attention", PassTimes(forward, 2.5 * forward, 0.0, 8)


def _attention(
    run: TrainingRun, mixer: AttentionSpec | LatentAttentionSpec
) -> Iterator[KernelTimes]:
    costs, layout, software = run.device_costs, run.layout, run.framework.attention
    heads = max(1, mixer.heads // layout.tp)
    window = None
    if isinstance(mixer, AttentionSpec):
        kv_heads = max(1, mixer.kv_heads // layout.tp)
        head_dim, value_dim = mixer.head_dim, mixer.head_dim
        window = mixer.window or mixer.chunk
    else:
        kv_heads, head_dim = heads, mixer.nope_dim + mixer.rope_dim
        value_dim = mixer.value_dim
    # Under context parallelism each rank does a balanced share of the whole triangle.
    share = 1.0 / layout.cp
    rotary = float(run.microbatch_tokens * (heads + kv_heads) * head_dim)
    turn = elementwise_s(costs, "rotary", rotary)
    times = []
    for part in ("forward", "backward"):
        if software == "unfused":
            seconds = unfused_attention_s(
                costs,
                batch=layout.microbatch,
                heads=heads,
                head_dim=head_dim,
                seq=run.sequence_length,
                part=part,
                precision="bf16",
            )
        else:
            seconds = attention_s(
                costs, batch=layout.microbatch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                seq=run.sequence_length, value_dim=value_dim, window=window, part=part,
                kernel="native" if software == "native" else "flash2",
            )  # fmt: skip
        times.append(share * seconds)
    yield "attention", PassTimes(times[0], times[1], 0.0, 1)
    if mixer.rotary is not None:
        yield "rotary", PassTimes(turn, turn, 0.0, 1)


def _expert_biases(run: TrainingRun, first: float, second: float) -> PassTimes:
    """Biases that grouped products do not add, and an activation that no kernel fuses with them."""
    added = elementwise_s(run.device_costs, "residual", first) + elementwise_s(
        run.device_costs, "residual", second
    )
    apart = 2 * elementwise_s(run.device_costs, "copy", first)
    return PassTimes(added + apart, added + 2 * apart, 0.0, 6)


def _casts(run: TrainingRun, *elements: float) -> PassTimes:
    """Quantising what the experts' products read: two inputs forward, two gradients backward."""
    passes = cast_passes(run)
    first, second, third = (
        passes * elementwise_s(run.device_costs, "quantise", count) for count in elements
    )
    return PassTimes(first + second, first + third, 0.0, 2 if passes else 0)


def activation_passes(costs: DeviceCosts, width: float, gated: bool) -> PassTimes:
    """Return the time of the activation over so many numbers."""
    elements = width * (2 if gated else 1)
    forward = elementwise_s(costs, "activation", elements)
    return PassTimes(forward, elementwise_s(costs, "activation_backward", elements), 0.0, 1)


def expert_passes(run: TrainingRun, experts: MoESpec) -> PassTimes:
    """Return the time of a layer of experts, the exchange between ranks left out."""
    return sum_passes(list_expert_kernels(run, experts))


def list_expert_kernels(run: TrainingRun, experts: MoESpec) -> Iterator[KernelTimes]:
    """List router, permutation, grouped products, activation, and the shared experts beside."""
    costs, layout, hidden = run.device_costs, run.layout, run.model.hidden
    yield from list_gemm_kernels(run, experts.list_weights(hidden))
    width = experts.latent or hidden
    etp, load = layout.effective_expert_tp, run.expert_load(experts)
    # The busiest rank sets the pace; its tokens spread evenly over its experts.
    routed = run.microbatch_tokens * experts.top_k * etp / layout.tp * load
    inner = experts.width // etp
    wide = inner * (2 if experts.gated else 1)
    yield "grouped_gemm", _grouped(run, experts, routed, ((wide, width), (width, inner)))
    if run.frozen:
        yield "grouped_gemm", PassTimes(*expert_lora_passes(run, experts, routed))
    plain = experts.gated and experts.activation == "silu" and not experts.bias
    fused = run.framework.fused_experts and plain
    if not fused:
        yield "activations", activation_passes(costs, inner * routed, experts.gated)
        if experts.bias:
            yield "activations", _expert_biases(run, routed * wide, routed * width)
        yield "casts", _casts(run, routed * width, routed * inner, routed * wide)
    if experts.shared_width:
        shared = experts.shared_width / layout.tp * run.microbatch_tokens
        yield "activations", activation_passes(costs, shared, experts.gated)
    router = linear_s(costs, run.local_tokens, experts.count, hidden, "bf16")
    scores = elementwise_s(costs, "softmax", float(run.local_tokens * experts.count * 2))
    moved = float(run.microbatch_tokens * experts.top_k * width / layout.tp)
    permute = elementwise_s(costs, "permute", moved) + elementwise_s(costs, "unpermute", moved)
    if fused:
        permute = 0.0
    elif run.framework.dispatcher == "alltoall" and not (
        run.framework.single_permute and layout.ep == 1
    ):
        # Copies are sorted by rank before the exchange, and by local expert after it.
        permute *= 1 + load
    else:
        permute *= load
    gradients = 1 if run.frozen else 2
    back = gradients * router + scores + permute
    yield "routing", PassTimes(router + scores + permute, back, 0.0, 10)


def _grouped(
    run: TrainingRun, experts: MoESpec, routed: float, shapes: tuple[tuple[int, int], ...]
) -> PassTimes:
    local = max(1, experts.count // run.layout.ep)
    each, precision = routed / local, run.layout.precision
    if run.framework.bf16_experts:
        precision = "bf16"

    def product_s(out: int, into: int, part: LinearPart) -> float:
        return grouped_gemm_s(
            run.device_costs, local, each, out, into, precision=precision, part=part
        )

    found = PassTimes()
    for out, into in shapes:
        weights = 0.0 if run.frozen else product_s(out, into, "weight_gradient")
        found += PassTimes(
            product_s(out, into, "forward"), product_s(out, into, "input_gradient"), weights, 1
        )
    return found
