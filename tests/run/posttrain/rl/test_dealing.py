"""Answers are dealt to replicas once each, in as many microbatches, and nothing else counts."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="makes tensors")

import torch

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.posttrain.objectives import loss_weights
from meshwright.run.posttrain.rl.distributed.microbatch_assignment import (
    MicrobatchAssignment,
    assign_microbatches,
    get_sequence_divisor,
    has_loss_tokens,
)
from meshwright.run.posttrain.rl.trainer.microbatches import build_microbatches
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey, RolloutTurn
from meshwright.spec.layout import Layout

CPU = torch.device("cpu")


def answer(number: int, drawn: int) -> Rollout:
    turn = RolloutTurn(
        tokens=(3,) * drawn, logprobs=(-1.0,) * drawn, finish="stop", version=0, seed=0
    )
    return Rollout(
        key=RolloutKey(0, number, 0), prompt=(1, 2), turns=(turn,), rewards=(), ending="finished"
    )


LENGTHS = (9, 1, 30, 4, 4, 17, 2, 8, 11)
ANSWERS = [answer(number, drawn) for number, drawn in enumerate(LENGTHS)]


def dealt(answers: int = len(LENGTHS), **layout: Any) -> MicrobatchAssignment:
    return assign_microbatches(
        ANSWERS, range(answers), Layout(**layout), most_tokens=40, device=CPU
    )


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_answer_is_dealt_once(dp: int) -> None:
    rows = [each for each in dealt(dp=dp).microbatches if has_loss_tokens(each)]
    assert sorted(torch.cat([each.rollout_indices for each in rows]).tolist()) == list(
        range(len(LENGTHS))
    )


@pytest.mark.parametrize("answers", [1, 3, 9])
def test_replicas_have_as_many_microbatches(answers: int) -> None:
    found = dealt(answers, dp=4)
    assert {found.replica_ids.count(replica) for replica in range(4)} == {
        len(found.microbatches) // 4
    }


def test_replicas_have_about_as_many_tokens() -> None:
    found, drawn = dealt(dp=2), [0, 0]
    for rows, owner in zip(found.microbatches, found.replica_ids, strict=True):
        drawn[owner] += int(rows.loss_tokens.mask.sum())
    assert sum(drawn) == sum(LENGTHS)
    assert max(drawn) - min(drawn) <= max(LENGTHS) - min(LENGTHS)


def test_what_only_keeps_step_has_no_part_in_totals() -> None:
    found = dealt(3, dp=4)
    assert not all(map(has_loss_tokens, found.microbatches))
    of = loss_weights.sum_step_totals(
        rows.loss_tokens for rows in found.microbatches if has_loss_tokens(rows)
    )
    assert of == loss_weights.StepTotals(sum(LENGTHS[:3]), 3)


def test_one_replica_has_the_microbatches_of_one_device() -> None:
    own = list(build_microbatches(ANSWERS, range(len(LENGTHS)), 40, CPU))
    for mine, one in zip(dealt(tp=2).microbatches, own, strict=True):
        assert torch.equal(mine.input_ids, one.input_ids)
        assert torch.equal(mine.rollout_indices, one.rollout_indices)


def test_lengths_divide_into_the_parts_that_ranks_share() -> None:
    layout = Layout(tp=2, cp=2, sequence_parallel=True)
    found = assign_microbatches(ANSWERS, range(9), layout, most_tokens=40, device=CPU)
    assert {
        rows.input_ids.shape[1] % get_sequence_divisor(layout) for rows in found.microbatches
    } == {0}
    plain = list(build_microbatches(ANSWERS, range(9), 40, CPU))
    for mine, one in zip(found.microbatches, plain, strict=True):
        length = one.targets.shape[1]
        assert torch.equal(mine.targets[:, :length], one.targets)
        assert (mine.targets[:, length:] == IGNORE_INDEX).all()
