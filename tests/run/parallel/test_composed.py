"""Axes composed: every pair of choices, in layouts of up to eight ranks, trains as one device.

Choices that are rarer than those of the array (other schedules, orders of axes and optimizers,
shares of experts, heads for further tokens) are composed by hand, on four ranks.
"""

from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

from meshwright.run.nn.decoder_builder import BuildOptions
from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec, MtpSpec, build_decoder_model
from tests.run.parallel.covering import Choice, choices, covering, olmo2, olmoe, pairs_of
from tests.run.parallel.equivalence import Case, check
from tests.run.parallel.zero.test_matrix_gather import MUON

LAYOUTS = covering()
FEW = 2
"""Layouts of eight ranks that are tried every time; all of them where slow tests are asked for."""


def together(ranks: int, size: int = 8) -> list[tuple[Choice, ...]]:
    rows = [each for each in LAYOUTS if each.ranks == ranks]
    return [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]


def wrong(rows: tuple[Choice, ...]) -> dict[str, list[str]]:
    return {name: lines for name, lines in check([row.case() for row in rows]).items() if lines}


def test_the_layouts_show_every_pair_of_choices() -> None:
    pairs = {pair for row in choices() for pair in pairs_of(row)}
    assert {pair for row in LAYOUTS for pair in pairs_of(row)} == pairs
    assert len(LAYOUTS) >= 24


def test_some_layouts_of_eight_ranks() -> None:
    assert wrong(together(8, FEW)[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [row for ranks in (2, 4, 8) for row in together(ranks)], ids=lambda rows: rows[0].name
)
def test_every_layout(rows: tuple[Choice, ...]) -> None:
    assert wrong(rows) == {}


DENSE = build_decoder_model("dense", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
TIED = msgspec.structs.replace(DENSE, tied=True)
FURTHER = msgspec.structs.replace(
    DENSE, multi_token=MtpSpec(depth=1, block=DENSE.blocks[0].name), embedding_norm=True
)
BALANCED = MoESpec(
    count=4, top_k=2, width=16, shared_width=16, router_bias="balance", scoring="sigmoid"
)
ROUTED = build_decoder_model(
    "routed", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, experts=BALANCED
)


def layout(**fields: Any) -> Layout:
    return msgspec.convert({"precision": "fp32", "microbatch": 1} | fields, Layout)


def routed(name: str, **fields: Any) -> Case:
    return Case(name, ROUTED, layout(**fields), options=BuildOptions(moe_aux_loss_coeff=0.05))


def piped(schedule: str, **fields: Any) -> Layout:
    chunks = 2 if schedule in {"zb-v", "dualpipe-v"} else 1
    return layout(pp=2, schedule=schedule, virtual_stages=chunks, **fields)


SHARED = {"tp": 2, "sequence_parallel": True}
RARE = [
    Case("zero 3 of context and tensors", DENSE, layout(tp=2, cp=2, zero=3)),
    Case("rings of traders, zero 2", DENSE, layout(cp=4, cp_kind="ring+ulysses", zero=2)),
    routed("slices of shared experts", tp=2, dp=2, ep=2, expert_tp=2, zero=1),
    routed("experts at both ends", pp=2, dp=2, ep=2, zero=2, schedule="dualpipe"),
    Case("pieces, split backward", DENSE, piped("zb-h1", **SHARED, overlap_tp=True)),
    Case(
        "pieces, keys on two ranks each",
        DENSE,
        layout(tp=4, sequence_parallel=True, overlap_tp=True),
    ),
    Case("shards in pairs", TIED, layout(dp=4, zero=2, shard=2)),
    routed("replicas first", tp=2, dp=2, ep=2, expert_tp=1, order="dp-ep-cp-tp-pp", zero=1),
    Case("tied, folded, zero 3", TIED, piped("dualpipe-v", dp=2, zero=3)),
    Case("two ahead, zero 2, recomputed", DENSE, piped("zb-h2", dp=2, zero=2, recompute="full")),
    Case("further tokens elsewhere", FURTHER, layout(**SHARED, cp=2), packed=True),
    Case("further tokens, folded, zero 3", FURTHER, piped("zb-v", dp=2, zero=3)),
    routed("experts over context", **SHARED, cp=2, ep=2, expert_tp=1),
    routed("experts, folded", **SHARED, pp=2, schedule="zb-v", virtual_stages=2),
    Case("muon", DENSE, layout(tp=2, dp=2, zero=1), optimizer="muon", tolerances=MUON),
    routed(
        "nothing overlapped",
        tp=2,
        dp=2,
        zero=2,
        overlap_gradients=False,
        overlap_parameters=False,
        overlap_ep=False,
    ),
    Case("norms of all heads, keys on two ranks each", olmo2(), layout(tp=4)),
    Case("the same with means", olmo2(kind="layer"), layout(tp=4)),
    Case(
        "norms of all heads, slices of experts",
        olmoe(),
        layout(tp=4, sequence_parallel=True, ep=2, expert_tp=2),
    ),
    Case("norms of all heads, folded", olmo2(), piped("zb-v", tp=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(RARE), 7), ids=lambda first: RARE[first].name)
def test_rare_choices_composed(first: int) -> None:
    found = check(RARE[first : first + 7])
    assert {name: lines for name, lines in found.items() if lines} == {}
