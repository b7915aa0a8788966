"""A sitting: figures of steps, and what guards make of losses and gradients."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.run.train.guards import TrainingStopped
from meshwright.run.train.outcome import outcome_of
from meshwright.run.train.outputs import Outputs
from meshwright.run.train.sitting import Sitting
from meshwright.run.train.step import Losses
from meshwright.run.train.trainer import Trainer
from meshwright.spec.model import flops_per_token
from tests.run.train.tiny import tiny_job

Rows = list[tuple[int, dict[str, float]]]


class Kept:
    """An output that keeps its rows."""

    def __init__(self) -> None:
        self.rows: Rows = []

    def write(self, step: int, figures: Any, /) -> None:
        self.rows.append((step, dict(figures)))

    def close(self) -> None:
        pass


@contextmanager
def sitting(
    tokens: Path, folder: Path, changes: dict[str, Any] | None = None
) -> Iterator[tuple[Sitting, Kept]]:
    trainer, kept = Trainer(tiny_job(tokens, changes), folder), Kept()
    try:
        yield Sitting(trainer, Outputs({"kept": kept})), kept
    finally:
        trainer.close()


def run(seat: Sitting, steps: int) -> None:
    for _ in range(steps):
        seat.step(seat.trainer.batches.at(seat.trainer.step_number), 0.0)


def spoil(seat: Sitting, step: int, change: Callable[[Losses], Losses]) -> None:
    """Let the gradients of one step come out differently."""
    plain = seat.trainer.step.gradients

    def gradients(batch: Any) -> Losses:
        losses = plain(batch)
        return change(losses) if seat.trainer.step_number + 1 == step else losses

    seat.trainer.step.gradients = gradients  # type: ignore[method-assign]


def nan_gradient(seat: Sitting) -> Callable[[Losses], Losses]:
    def change(losses: Losses) -> Losses:
        grad = seat.trainer.decoder.embedding.weight.grad
        assert grad is not None
        grad[0, 0] = torch.nan
        return losses

    return change


def weights(seat: Sitting) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in seat.trainer.decoder.parameters()])


@pytest.mark.parametrize("spike_action", ["warn", "skip"])
def test_a_gradient_that_is_no_number_changes_nothing_and_is_counted(
    tokens: Path, tmp_path: Path, spike_action: str
) -> None:
    with sitting(tokens, tmp_path, {"guards": {"spike_action": spike_action}}) as (seat, kept):
        run(seat, 1)
        before = weights(seat)
        spoil(seat, 2, nan_gradient(seat))
        with pytest.warns(UserWarning, match="the gradient of step 2 is nan"):
            run(seat, 1)
        assert torch.equal(weights(seat), before)
        assert kept.rows[-1][1]["skipped_steps"] == 1
        assert seat.trainer.guard.state.skipped_in_row == 1
        run(seat, 1)
        assert not torch.equal(weights(seat), before)
        assert seat.trainer.guard.state.skipped_in_row == 0
        assert outcome_of(seat, None, None).skipped == 1


@pytest.mark.parametrize("spike_action", ["warn", "skip"])
def test_the_step_that_ends_a_run_is_written_down(
    tokens: Path, tmp_path: Path, spike_action: str
) -> None:
    changes = {"guards": {"most_skipped": 0, "spike_action": spike_action}}
    with sitting(tokens, tmp_path, changes) as (seat, kept):
        spoil(seat, 2, nan_gradient(seat))
        with pytest.raises(TrainingStopped, match=r"step 2: the gradient.*there is no checkpoint"):
            run(seat, 2)
        assert [step for step, _ in kept.rows] == [1, 2]


SPIKES = {"spike_after": 2, "spike_window": 4, "spike_deviations": 2.0}


def larger(losses: Losses) -> Losses:
    return losses._replace(nats=losses.nats * 100)


def test_a_spike_is_left_out_where_that_is_asked_for(tokens: Path, tmp_path: Path) -> None:
    with sitting(tokens, tmp_path, {"guards": {**SPIKES, "spike_action": "skip"}}) as (seat, kept):
        run(seat, 3)
        before = weights(seat)
        spoil(seat, 4, larger)
        with pytest.warns(UserWarning, match="the loss of step 4 is"):
            run(seat, 1)
        assert torch.equal(weights(seat), before)
        assert kept.rows[-1][1]["gradient_norm"] > 0


def test_a_spike_is_only_told_by_default(tokens: Path, tmp_path: Path) -> None:
    with sitting(tokens, tmp_path, {"guards": SPIKES}) as (seat, _):
        run(seat, 3)
        before = weights(seat)
        spoil(seat, 4, larger)
        with pytest.warns(UserWarning, match="the loss of step 4 is"):
            run(seat, 1)
        assert not torch.equal(weights(seat), before)


def test_an_fp16_scale_that_is_too_large_is_no_fault(tokens: Path, tmp_path: Path) -> None:
    changes = {"layout": {"precision": "fp16"}, "optimizer": {"loss_scale": {"first": 1e30}},
               "guards": {"most_skipped": 0}}  # fmt: skip
    with sitting(tokens, tmp_path, changes) as (seat, kept), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(seat, 2)
        scales = [row["loss_scale"] for _, row in kept.rows]
        assert scales[1] < scales[0]


def test_rows_come_as_often_as_asked_and_at_the_end(tokens: Path, tmp_path: Path) -> None:
    with sitting(tokens, tmp_path, {"output": {"every_steps": 5}}) as (seat, kept):
        run(seat, 12)
        assert [step for step, _ in kept.rows] == [5, 10, 12]


def test_packed_documents_count_the_flops_of_their_own_lengths(
    tokens: Path, tmp_path: Path
) -> None:
    with sitting(tokens, tmp_path, {"workload": {"packing": "pack"}}) as (seat, _):
        model = seat.trainer.job.model
        run(seat, 2)
        outcome = outcome_of(seat, None, None)
        assert outcome.tokens_per_s is not None
        per_token = seat.used[-1] / seat.rates[-1]
        assert flops_per_token(model, 1) < per_token < flops_per_token(model, 32)


@pytest.mark.filterwarnings("ignore:experts.capacity_factor")
@pytest.mark.parametrize(("factor", "low", "high"), [(0.5, 0.4, 0.6), (2.0, 0.0, 0.0)])
def test_the_share_of_choices_that_found_no_room_is_written(
    tokens: Path, tmp_path: Path, factor: float, low: float, high: float
) -> None:
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary": {}}
    mlp = {"kind": "experts", "count": 4, "top_k": 2, "width": 16}
    model = {"blocks": [{"name": "dense", "mixer": mixer, "mlp": mlp}]}
    changes = {"model": model, "experts": {"capacity_factor": factor}}
    with sitting(tokens, tmp_path, changes) as (seat, kept):
        run(seat, 2)
    shares = [row["dropped_share"] for _, row in kept.rows]
    assert len(shares) == 2
    assert all(low <= share <= high for share in shares)


def test_the_parts_of_a_step_add_up_to_it(tokens: Path, tmp_path: Path) -> None:
    with sitting(tokens, tmp_path) as (seat, kept):
        run(seat, 3)
    for _, row in kept.rows:
        parts = [row[f"{name}_s"] for name in ("between", "gradients", "update")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(row["step_s"])
        assert "exchange_wait_s" not in row  # there is nobody to wait for
