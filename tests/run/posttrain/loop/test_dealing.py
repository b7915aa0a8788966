"""Answers are dealt to replicas once each, in as many microbatches, and nothing else counts."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="makes tensors")

import torch

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.posttrain.loop.answers import microbatches
from meshwright.run.posttrain.loop.ranks.dealing import Dealt, counts, deal, parts_of_sequence
from meshwright.run.posttrain.objectives import averaging
from meshwright.run.posttrain.rollouts.record import Key, Rollout, Turn
from meshwright.spec.layout import Layout

CPU = torch.device("cpu")


def answer(number: int, drawn: int) -> Rollout:
    turn = Turn(tokens=(3,) * drawn, logprobs=(-1.0,) * drawn, finish="stop", version=0, seed=0)
    return Rollout(key=Key(0, number, 0), prompt=(1, 2), turns=(turn,), rewards=(), ending="done")


LENGTHS = (9, 1, 30, 4, 4, 17, 2, 8, 11)
ANSWERS = [answer(number, drawn) for number, drawn in enumerate(LENGTHS)]


def dealt(answers: int = len(LENGTHS), **layout: Any) -> Dealt:
    return deal(ANSWERS, range(answers), Layout(**layout), most_tokens=40, device=CPU)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_answer_is_dealt_once(dp: int) -> None:
    rows = [each for each in dealt(dp=dp).rows if counts(each)]
    assert sorted(torch.cat([each.own for each in rows]).tolist()) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("answers", [1, 3, 9])
def test_replicas_have_as_many_microbatches(answers: int) -> None:
    found = dealt(answers, dp=4)
    assert {found.owners.count(replica) for replica in range(4)} == {len(found.rows) // 4}


def test_replicas_have_about_as_many_tokens() -> None:
    found, drawn = dealt(dp=2), [0, 0]
    for rows, owner in zip(found.rows, found.owners, strict=True):
        drawn[owner] += int(rows.counted.mask.sum())
    assert sum(drawn) == sum(LENGTHS)
    assert max(drawn) - min(drawn) <= max(LENGTHS) - min(LENGTHS)


def test_what_only_keeps_step_has_no_part_in_totals() -> None:
    found = dealt(3, dp=4)
    assert not all(map(counts, found.rows))
    of = averaging.totals(rows.counted for rows in found.rows if counts(rows))
    assert of == averaging.Totals(sum(LENGTHS[:3]), 3)


def test_one_replica_has_the_microbatches_of_one_device() -> None:
    own = list(microbatches(ANSWERS, range(len(LENGTHS)), 40, CPU))
    for mine, one in zip(dealt(tp=2).rows, own, strict=True):
        assert torch.equal(mine.tokens, one.tokens)
        assert torch.equal(mine.own, one.own)


def test_lengths_divide_into_the_parts_that_ranks_share() -> None:
    layout = Layout(tp=2, cp=2, sequence_parallel=True)
    found = deal(ANSWERS, range(9), layout, most_tokens=40, device=CPU)
    assert {rows.tokens.shape[1] % parts_of_sequence(layout) for rows in found.rows} == {0}
    plain = list(microbatches(ANSWERS, range(9), 40, CPU))
    for mine, one in zip(found.rows, plain, strict=True):
        length = one.targets.shape[1]
        assert torch.equal(mine.targets[:, :length], one.targets)
        assert (mine.targets[:, length:] == IGNORED).all()
