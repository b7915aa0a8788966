"""Context parallelism of every kind gives what one device gives."""

from typing import Any, get_args

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.parallel.context_parallel.context_parallel import (
    find_context_parallel_problems,
    split_tokens,
)
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import ContextParallelKind
from meshwright.spec.model import (
    AttentionSpec,
    AttentionTemperature,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MtpSpec,
    Rotary,
    build_decoder_model,
    build_gpt,
)
from tests.run.parallel.equivalence import Case, check

KINDS: tuple[ContextParallelKind, ...] = get_args(ContextParallelKind)
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8}
ROTARY = Rotary()


def model(name: str, *mixers: Any, **more: Any) -> Model:
    """Build a model of one layer for each mixer."""
    blocks = tuple(
        BlockSpec(name=f"b{index}", mixer=mixer, mlp=MLPSpec(width=48))
        for index, mixer in enumerate(mixers)
    )
    pattern = " ".join(block.name for block in blocks)
    return Model(name=name, hidden=32, vocab=61, blocks=blocks, pattern=pattern, **more)


DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
GPT_OSS = model(
    "gpt-oss",
    AttentionSpec(**HEADS, rotary=ROTARY, window=5, sinks=True),
    AttentionSpec(**HEADS, rotary=ROTARY, sinks=True, qk_norm="head"),
)
GEMMA = model(
    "gemma",
    AttentionSpec(**HEADS, rotary=ROTARY, window=6, softcap=1.5),
    AttentionSpec(**HEADS, rotary=ROTARY, softcap=1.5, gate=True),
)
LLAMA4 = model(
    "llama4",
    AttentionSpec(**HEADS, rotary=ROTARY, chunk=6),
    AttentionSpec(**HEADS, temperature=AttentionTemperature(floor=4, scale=0.3)),
)
LATENT = model(
    "latent",
    LatentAttentionSpec(
        heads=4, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=6, q_rank=16, rotary=ROTARY
    ),
    multi_token=MtpSpec(depth=2, block="b0"),
)
HYBRID = model(
    "hybrid",
    Mamba2Spec(heads=4, head_dim=8, state_dim=8, groups=2),
    GatedDeltaNetSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
    AttentionSpec(**HEADS, rotary=ROTARY, causal=False),
)
# Without biases: a key's moves all scores of a query alike, so its gradient is rounding alone.
LEARNED = build_gpt("learned", layers=1, hidden=32, heads=4, vocab=61, max_positions=16, bias=False)
SLOPES = build_gpt("slopes", layers=1, hidden=32, heads=4, vocab=61, positions="alibi", bias=False)


def layout(kind: ContextParallelKind, cp: int = 2, **more: Any) -> Layout:
    return Layout(cp=cp, cp_kind=kind, microbatch=2, precision="fp32", **more)


def words(asked: Layout) -> str:
    return f"{asked.cp_kind} cp{asked.cp} tp{asked.tp}"


def wrong(cases: list[Case]) -> dict[str, list[str]]:
    return {name: lines for name, lines in check(cases).items() if lines}


def two_ranks() -> list[Case]:
    some = {
        "ring": (GPT_OSS, SLOPES, LLAMA4, GEMMA, LATENT, LEARNED),
        "allgather": (GPT_OSS, SLOPES, LLAMA4),
        "ulysses": (GPT_OSS, GEMMA, LATENT, SLOPES),
        "ring+ulysses": (DENSE,),
    }
    core: dict[str, Any] = {"recompute": "selective", "recompute_ops": ("core_attn", "mla_up_proj")}
    # Every other one is packed.
    return [
        Case(f"{kind} {each.name}", each, layout(kind), 4, packed=index % 2 == 0)
        for kind in KINDS
        for index, each in enumerate(some[kind])
    ] + [
        Case("core recomputed", LATENT, layout("ring", **core), 4, packed=True),
        Case("gathered core recomputed", LATENT, layout("allgather", **core), 4),
        Case("all recomputed", GPT_OSS, layout("ring", recompute="full"), 4, packed=True),
    ]


def four_ranks() -> list[Case]:
    share: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    found = [Case(f"four {kind}", DENSE, layout(kind, 4), 4, packed=True) for kind in KINDS]
    found += [Case(f"tp {kind}", GPT_OSS, layout(kind, **share), 4, packed=True) for kind in KINDS]
    return [
        *found,
        Case("four in a ring, not packed", DENSE, layout("ring", 4), 4),
        Case("whole tp slopes", SLOPES, layout("ring", tp=2), 4),
        Case("tp hybrid", HYBRID, layout("ring", **share), 4, packed=True),
        Case("tp latent", LATENT, layout("allgather", **share), 4),
        Case("tp learned", LEARNED, layout("ulysses", **share), 4),
        Case("rings of pairs that trade", LATENT, layout("ring+ulysses", 4), 4, packed=True),
        Case("capped rings of pairs", GEMMA, layout("ring+ulysses", 4), 4, packed=True),
        Case("dp ring", LATENT, layout("ring", dp=2), 4, packed=True),
    ]


@pytest.mark.parametrize("cases", [two_ranks, pytest.param(four_ranks, marks=pytest.mark.slow)])
def test_ranks_that_share_sequences_train_as_one_device(cases: Any) -> None:
    assert wrong(cases()) == {}


def whole() -> Microbatch:
    tokens = torch.arange(2 * 8).view(2, 8)
    documents = PackedSequences.from_lengths([(3, 5), (8,)])
    return Microbatch(tokens, tokens + 1, None, documents)


def test_a_rank_has_its_tokens_with_their_positions_in_their_documents() -> None:
    found = split_tokens(whole(), layout("ring"), 0)
    assert found.tokens_BT.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert found.labels_BT.tolist() == [[1, 2, 7, 8], [9, 10, 15, 16]]
    assert found.positions_BT is not None
    assert found.positions_BT.tolist() == [[0, 1, 3, 4], [0, 1, 6, 7]]
    assert found.full_sequence_length == 8


def test_tokens_further_on_are_those_of_the_whole_sequence() -> None:
    found = split_tokens(whole(), layout("ring"), 0, further=1)
    assert found.future_tokens is not None
    ((tokens, labels),) = found.future_tokens
    # The next of token 1 is with the other rank, that of token 7 does not exist.
    assert tokens.tolist() == [[1, 2, 7, 0], [9, 10, 15, 0]]
    assert labels.tolist() == [[2, 3, 8, IGNORE_INDEX], [10, 11, 16, IGNORE_INDEX]]


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="8 does not divide into the 16 parts"):
        split_tokens(whole(), layout("ring", 4, tp=2, sequence_parallel=True), 0)


def test_heads_that_do_not_divide_are_refused_where_ranks_trade_them() -> None:
    (found,) = find_context_parallel_problems(DENSE, layout("ulysses", 8))
    assert (found.where, found.fix) == ("layout.cp", "use cp_kind=ring or allgather, or cp=4")
    assert "4 heads" in found.what
    assert find_context_parallel_problems(DENSE, layout("ring", 8)) == []
    assert find_context_parallel_problems(DENSE, layout("ring+ulysses", 8)) == []
    (found,) = find_context_parallel_problems(DENSE, layout("ring+ulysses", 8, tp=4))
    assert found.where == "layout.cp_kind"
    assert found.fix == "use cp_kind=ring or allgather, or tp=2"


@pytest.mark.parametrize(
    ("heads", "asked"),
    [
        (3, layout("ulysses", 2)),
        (6, layout("ulysses", 2, tp=2)),
        (6, layout("ring+ulysses", 4, tp=2)),
        (5, layout("ring+ulysses", 4)),
    ],
    ids=lambda each: each if isinstance(each, int) else words(each),
)
def test_every_way_out_that_is_named_is_one(heads: int, asked: Layout) -> None:
    odd = build_decoder_model("odd", layers=2, hidden=8 * heads, heads=heads, ffn=48, vocab=61)
    (found,) = find_context_parallel_problems(odd, asked)
    for way in found.fix.removeprefix("use ").replace("ring or allgather", "ring").split(", or "):
        name, _, value = way.partition("=")
        changed = replace(asked, **{name: int(value) if value.isdigit() else value})
        assert find_context_parallel_problems(odd, changed) == []
