"""Tensor parallelism, with and without sequence parallelism, gives what one device gives."""

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder, gpt
from tests.run.parallel.equivalence import Case, check

BIASED = gpt("biased", layers=2, hidden=32, heads=4, vocab=61, max_positions=32)
DENSE = decoder("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)


def cases(ranks: int) -> list[Case]:
    plain = Layout(tp=ranks, microbatch=2, precision="fp32")
    sequence = Layout(tp=ranks, sequence_parallel=True, microbatch=2, precision="fp32")
    return [
        Case("all tokens on every rank", DENSE, plain),
        Case("a share of the tokens on each", DENSE, sequence),
        Case("packed documents", DENSE, sequence, packed=True),
        Case("products in pieces", DENSE, msgspec.structs.replace(sequence, overlap_tp=True)),
        Case("with biases, in pieces", BIASED, msgspec.structs.replace(sequence, overlap_tp=True)),
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_heads_train_as_one_device(ranks: int) -> None:
    # Of four ranks two each hold the same key and value head.
    found = check(cases(ranks))
    assert {name: lines for name, lines in found.items() if lines} == {}
