"""A session: figures of steps, and what guards make of losses and gradients."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.run.train.logging import MetricLoggers
from meshwright.run.train.loss_guard import TrainingStoppedError
from meshwright.run.train.train_result import make_train_result
from meshwright.run.train.train_session import TrainSession
from meshwright.run.train.train_step import StepLosses
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
def session(
    tokens: Path, folder: Path, changes: dict[str, Any] | None = None
) -> Iterator[tuple[TrainSession, Kept]]:
    trainer, kept = Trainer(tiny_job(tokens, changes), folder), Kept()
    try:
        yield TrainSession(trainer, MetricLoggers({"kept": kept})), kept
    finally:
        trainer.close()


def run(seat: TrainSession, steps: int) -> None:
    for _ in range(steps):
        seat.step(seat.trainer.train_dataset.get_batch(seat.trainer.step_number), 0.0)


def spoil(seat: TrainSession, step: int, change: Callable[[StepLosses], StepLosses]) -> None:
    """Let the gradients of one step come out differently."""
    plain = seat.trainer.train_step.forward_backward

    def gradients(batch: Any) -> StepLosses:
        losses = plain(batch)
        return change(losses) if seat.trainer.step_number + 1 == step else losses

    seat.trainer.train_step.forward_backward = gradients  # type: ignore[method-assign]


def nan_gradient(seat: TrainSession) -> Callable[[StepLosses], StepLosses]:
    def change(losses: StepLosses) -> StepLosses:
        grad = seat.trainer.decoder.embedding.weight.grad
        assert grad is not None
        grad[0, 0] = torch.nan
        return losses

    return change


def weights(seat: TrainSession) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in seat.trainer.decoder.parameters()])


@pytest.mark.parametrize("spike_action", ["warn", "skip"])
def test_a_gradient_that_is_no_number_changes_nothing_and_is_counted(
    tokens: Path, tmp_path: Path, spike_action: str
) -> None:
    with session(tokens, tmp_path, {"loss_guard": {"spike_action": spike_action}}) as (seat, kept):
        run(seat, 1)
        before = weights(seat)
        spoil(seat, 2, nan_gradient(seat))
        with pytest.warns(UserWarning, match="the gradient of step 2 is nan"):
            run(seat, 1)
        assert torch.equal(weights(seat), before)
        assert kept.rows[-1][1]["skipped_steps"] == 1
        assert seat.trainer.loss_guard.state.skipped_in_row == 1
        run(seat, 1)
        assert not torch.equal(weights(seat), before)
        assert seat.trainer.loss_guard.state.skipped_in_row == 0
        assert make_train_result(seat, None, None).skipped_steps == 1


@pytest.mark.parametrize("spike_action", ["warn", "skip"])
def test_the_step_that_ends_a_run_is_written_down(
    tokens: Path, tmp_path: Path, spike_action: str
) -> None:
    changes = {"loss_guard": {"max_skipped_steps": 0, "spike_action": spike_action}}
    with session(tokens, tmp_path, changes) as (seat, kept):
        spoil(seat, 2, nan_gradient(seat))
        with pytest.raises(
            TrainingStoppedError, match=r"step 2: the gradient.*there is no checkpoint"
        ):
            run(seat, 2)
        assert [step for step, _ in kept.rows] == [1, 2]


SPIKES = {"spike_min_steps": 2, "spike_window": 4, "spike_threshold": 2.0}


def larger(losses: StepLosses) -> StepLosses:
    return losses._replace(loss_sum=losses.loss_sum * 100)


def test_a_spike_is_left_out_where_that_is_asked_for(tokens: Path, tmp_path: Path) -> None:
    with session(tokens, tmp_path, {"loss_guard": {**SPIKES, "spike_action": "skip"}}) as (
        seat,
        kept,
    ):
        run(seat, 3)
        before = weights(seat)
        spoil(seat, 4, larger)
        with pytest.warns(UserWarning, match="the loss of step 4 is"):
            run(seat, 1)
        assert torch.equal(weights(seat), before)
        assert kept.rows[-1][1]["grad_norm"] > 0


def test_a_spike_is_only_told_by_default(tokens: Path, tmp_path: Path) -> None:
    with session(tokens, tmp_path, {"loss_guard": SPIKES}) as (seat, _):
        run(seat, 3)
        before = weights(seat)
        spoil(seat, 4, larger)
        with pytest.warns(UserWarning, match="the loss of step 4 is"):
            run(seat, 1)
        assert not torch.equal(weights(seat), before)


def test_an_fp16_scale_that_is_too_large_is_no_fault(tokens: Path, tmp_path: Path) -> None:
    changes = {"layout": {"precision": "fp16"}, "optimizer": {"grad_scaler": {"init_scale": 1e30}},
               "loss_guard": {"max_skipped_steps": 0}}  # fmt: skip
    with session(tokens, tmp_path, changes) as (seat, kept), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(seat, 2)
        scales = [row["loss_scale"] for _, row in kept.rows]
        assert scales[1] < scales[0]


def test_rows_come_as_often_as_asked_and_at_the_end(tokens: Path, tmp_path: Path) -> None:
    with session(tokens, tmp_path, {"logging": {"every_steps": 5}}) as (seat, kept):
        run(seat, 12)
        assert [step for step, _ in kept.rows] == [5, 10, 12]


def test_packed_documents_count_the_flops_of_their_own_lengths(
    tokens: Path, tmp_path: Path
) -> None:
    with session(tokens, tmp_path, {"workload": {"packing": "pack"}}) as (seat, _):
        model = seat.trainer.job.model
        run(seat, 2)
        outcome = make_train_result(seat, None, None)
        assert outcome.tokens_per_s is not None
        per_token = seat.flops_per_s[-1] / seat.tokens_per_s[-1]
        assert flops_per_token(model, 1) < per_token < flops_per_token(model, 32)


@pytest.mark.filterwarnings("ignore:moe.capacity_factor")
@pytest.mark.parametrize(("factor", "low", "high"), [(0.5, 0.4, 0.6), (2.0, 0.0, 0.0)])
def test_the_share_of_choices_that_found_no_room_is_written(
    tokens: Path, tmp_path: Path, factor: float, low: float, high: float
) -> None:
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary": {}}
    mlp = {"kind": "experts", "count": 4, "top_k": 2, "width": 16}
    model = {"blocks": [{"name": "dense", "mixer": mixer, "mlp": mlp}]}
    changes = {"model": model, "moe": {"capacity_factor": factor}}
    with session(tokens, tmp_path, changes) as (seat, kept):
        run(seat, 2)
    shares = [row["dropped_token_fraction"] for _, row in kept.rows]
    assert len(shares) == 2
    assert all(low <= share <= high for share in shares)


def test_the_parts_of_a_step_add_up_to_it(tokens: Path, tmp_path: Path) -> None:
    with session(tokens, tmp_path) as (seat, kept):
        run(seat, 3)
    for _, row in kept.rows:
        parts = [row[name] for name in ("step_gap_s", "forward_backward_s", "optimizer_s")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(row["step_s"])
        assert "comm_wait_s" not in row  # there is nobody to wait for
