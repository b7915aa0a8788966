"""Which part of every parameter a rank holds, from the modules alone: no process group is needed.

Tensor parallelism cuts the products of a part of a layer along heads or inner width: the first ones
by rows, the last one by columns, so that each rank's result is a part of a sum. Everything else
inside a part is held whole by every rank, each with a part of the gradient; so is what stands
between the parts, where ranks have different tokens. Experts are cut by expert and by width.

A stage of a pipeline is a decoder without the layers of others; see `stage`.
"""

from collections.abc import Iterator

from torch import nn

from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder, LMHead, TokenEmbedding
from meshwright.run.nn.mlp import MLPLayer
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec, split_evenly
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import V_SCHEDULES
from meshwright.spec.layout.ranks import get_coordinate, get_expert_coordinate

RangesByAxis = dict[int, tuple[IndexRange, ...]]
"""The ranges held of some axes of a parameter; all of the others."""


class AxisShare:
    """One rank's share along an axis of a layout."""

    def __init__(self, ranks: int, index: int) -> None:
        self.ranks, self.index = ranks, index

    def of(self, *sizes: int) -> tuple[IndexRange, ...]:
        """Return the share of each of some runs of places that lie one behind the other."""
        found, offset = [], 0
        for size in sizes:
            found.append(split_evenly(size, self.ranks, self.index, offset=offset))
            offset += size
        return tuple(found)


def make_shard_specs(decoder: Decoder, layout: Layout, rank: int) -> dict[str, ShardSpec]:
    """Return how a rank holds each parameter of a decoder that was built whole."""
    place, among = get_coordinate(layout, rank), get_expert_coordinate(layout, rank)
    tensor = AxisShare(layout.tp, place.tp)
    width, spread = (
        AxisShare(layout.effective_expert_tp, among.expert_tp),
        AxisShare(layout.ep, among.ep),
    )
    cuts: dict[str, RangesByAxis] = {}
    inside: set[str] = set()
    experts: set[str] = set()
    twins: dict[str, tuple[int, IndexRange]] = {}
    for path, module in decoder.named_modules():
        for name, cut in _cuts(module, tensor):
            cuts[f"{path}.{name}"] = cut
        if isinstance(module, MoELayer):
            for name, cut in _expert_cuts(module, spread, width):
                cuts[f"{path}.{name}"] = cut
                experts.add(f"{path}.{name}")
        if isinstance(module, _PARTS):
            inside.update(f"{path}.{name}" for name in _shared_out(module))
        if isinstance(module, SelfAttention):
            for name, shared in _twins(module, tensor):
                twins[f"{path}.{name}"] = shared
    found = {}
    for name, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        cut = cuts.get(name, {})
        parts = tuple(cut.get(axis, (IndexRange(0, size),)) for axis, size in enumerate(shape))
        degree, rows = twins.get(name, (1, None))
        expert = name in experts
        found[name] = ShardSpec(
            shape,
            parts,
            expert,
            _partial(name, layout, cut=bool(cut), inside=name in inside, expert=expert),
            degree,
            rows,
            _stages(name, decoder, layout),
        )
    return found


_PARTS = (SelfAttention, MLASelfAttention, Mamba2Mixer, GatedDeltaNet, MLPLayer, MoELayer)
"""Modules whose ranks each do a share of the work."""


def _shared_out(module: nn.Module) -> Iterator[str]:
    """Yield the parameters of a part that each rank applies to a share of the work."""
    for name, _ in module.named_parameters():
        # The shared experts' gate reads whatever tokens a rank has, not a share of them.
        if not (isinstance(module, MoELayer) and name.startswith("shared_gate.")):
            yield name


def _partial(name: str, layout: Layout, *, cut: bool, inside: bool, expert: bool) -> str:
    """Name the group whose ranks each have a part of a parameter's gradient."""
    if expert:
        # Of the ranks that share an expert only the first adds its bias.
        return "expert_tp" if name.endswith("down_bias") and layout.effective_expert_tp > 1 else ""
    if cut or layout.tp == 1:
        return ""
    return "tp" if inside or layout.sequence_parallel else ""


def _stages(name: str, decoder: Decoder, layout: Layout) -> str:
    """Name the group of pipeline ranks that hold a parameter together."""
    if layout.pp == 1:
        return ""
    if layout.schedule == "dualpipe":
        return "mirror"
    if layout.schedule in V_SCHEDULES:
        return ""  # both ends are on the first rank
    tied = decoder.model.tied and name.startswith("embedding.")
    further = len(decoder.multi_token) > 0 and name.startswith(_EMBEDS)
    return "embedding" if tied or further else ""


_EMBEDS = ("embedding.", "positions.", "norm_embedding.")
"""What makes vectors of tokens, which heads that predict further tokens do once more."""


def _cuts(module: nn.Module, tensor: AxisShare) -> Iterator[tuple[str, RangesByAxis]]:
    """Yield the parameters of a module, by their own names, that tensor parallelism cuts."""
    if tensor.ranks == 1:
        return
    match module:
        case TokenEmbedding():
            # Positions are held whole; `Decoder.embedding` alone is told to be cut.
            if module.is_vocab_parallel:
                yield "weight", {0: tensor.of(module.weight.shape[0])}
        case LMHead():
            for name, parameter in module.named_parameters():
                yield name, {0: tensor.of(parameter.shape[0])}
        case SelfAttention():
            yield from _attention(module, tensor)
        case MLASelfAttention():
            spec = module.spec
            queries = {0: tensor.of(spec.heads * (spec.nope_dim + spec.rope_dim))}
            yield ("q.weight" if spec.q_rank is None else "q_up.weight"), queries
            yield "kv_up.weight", {0: tensor.of(spec.heads * (spec.nope_dim + spec.value_dim))}
            yield "o.weight", {1: tensor.of(spec.heads * spec.value_dim)}
        case Mamba2Mixer():
            yield from _mamba(module, tensor)
        case GatedDeltaNet():
            yield from _gated_delta(module, tensor)
        case MLPLayer():
            first = module.gate_up if module.is_gated else module.up
            width = module.down.weight.shape[1]
            rows = {0: tensor.of(*((width, width) if module.is_gated else (width,)))}
            name = "gate_up" if module.is_gated else "up"
            yield f"{name}.weight", rows
            if first.bias is not None:
                yield f"{name}.bias", rows
            yield "down.weight", {1: tensor.of(width)}


def _attention(module: SelfAttention, tensor: AxisShare) -> Iterator[tuple[str, RangesByAxis]]:
    spec = module.spec
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q = tensor.of(queries)[0]
    k, v = _keys(module, tensor)
    rows: tuple[IndexRange, ...] = (q, k, v)
    if spec.gate:
        rows += (IndexRange(q.start + queries + 2 * keys, q.stop + queries + 2 * keys),)
    yield "qkv.weight", {0: rows}
    if module.qkv.bias is not None:
        yield "qkv.bias", {0: rows}
    yield "o.weight", {1: (q,)}
    if module.sinks is not None:
        yield "sinks", {0: tensor.of(spec.heads)}
    if spec.qk_norm == "full":
        for name, held in (
            ("q_norm", q),
            ("k_norm", IndexRange(k.start - queries, k.stop - queries)),
        ):
            for each, _ in module.get_submodule(name).named_parameters():
                yield f"{name}.{each}", {0: (held,)}


def _keys(module: SelfAttention, tensor: AxisShare) -> tuple[IndexRange, IndexRange]:
    """Return the rows of `qkv` with this rank's keys, and those with its values."""
    spec = module.spec
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.kv_heads >= tensor.ranks:
        _, k, v = tensor.of(queries, keys, keys)
        return k, v
    # Fewer heads than ranks: neighbours hold the same one.
    head = tensor.index * spec.kv_heads // tensor.ranks
    k = IndexRange(queries + head * spec.head_dim, queries + (head + 1) * spec.head_dim)
    return k, IndexRange(k.start + keys, k.stop + keys)


def _twins(
    module: SelfAttention, tensor: AxisShare
) -> Iterator[tuple[str, tuple[int, IndexRange]]]:
    """Yield what neighbours hold too: how many do, and which rows of theirs."""
    spec = module.spec
    if spec.kv_heads >= tensor.ranks:
        return
    neighbours = tensor.ranks // spec.kv_heads
    queries = spec.heads // tensor.ranks * spec.head_dim
    for name in ("qkv.weight", "qkv.bias"):
        yield name, (neighbours, IndexRange(queries, queries + 2 * spec.head_dim))
    for name in ("k_norm.weight", "k_norm.bias") if spec.qk_norm == "full" else ():
        yield name, (neighbours, IndexRange(0, spec.head_dim))


def _mamba(module: Mamba2Mixer, tensor: AxisShare) -> Iterator[tuple[str, RangesByAxis]]:
    spec = module.spec
    inner, states = spec.heads * spec.head_dim, spec.groups * spec.state_dim
    yield "input.weight", {0: tensor.of(inner, inner, states, states, spec.heads)}
    if module.input.bias is not None:
        yield "input.bias", {0: tensor.of(inner, inner, states, states, spec.heads)}
    for name, _ in module.conv.named_parameters():
        yield f"conv.{name}", {0: tensor.of(inner, states, states)}
    for name in ("decay_log", "step_bias", "skip"):
        yield name, {0: tensor.of(spec.heads)}
    yield "norm.weight", {0: tensor.of(inner)}
    yield "out.weight", {1: tensor.of(inner)}


def _gated_delta(module: GatedDeltaNet, tensor: AxisShare) -> Iterator[tuple[str, RangesByAxis]]:
    spec = module.spec
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    yield "qkvz.weight", {0: tensor.of(keys, keys, values, values)}
    yield "gates.weight", {0: tensor.of(spec.value_heads, spec.value_heads)}
    yield "conv.weight", {0: tensor.of(keys, keys, values)}
    for name in ("decay_log", "step_bias"):
        yield name, {0: tensor.of(spec.value_heads)}
    yield "o.weight", {1: tensor.of(values)}


def _expert_cuts(
    module: MoELayer, spread: AxisShare, width: AxisShare
) -> Iterator[tuple[str, RangesByAxis]]:
    """Yield the routed experts' parameters: cut by expert, and by the width inside each."""
    spec = module.spec
    which = spread.of(spec.count)
    inner = width.of(*((spec.width, spec.width) if spec.gated else (spec.width,)))
    first = "gate_up" if spec.gated else "up"
    yield first, {0: which, 1: inner}
    yield "down", {0: which, 2: width.of(spec.width)}
    if spec.bias:
        yield f"{first}_bias", {0: which, 1: inner}
        yield "down_bias", {0: which}
