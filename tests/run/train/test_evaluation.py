"""The held-out loss: the same sequences whatever the batch, and nothing changed by it."""

from pathlib import Path

import pytest
import torch

from meshwright.run.train.data.dataset_builder import build_dataset
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.evaluation import compute_eval_loss
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.train_step import TrainStep
from tests.run.train.tiny import tiny_job

CPU = torch.device("cpu")


def loss_with(tokens: Path, batch: int, sequences: int, packing: str = "concat") -> float:
    job = tiny_job(tokens, {"workload": {"global_batch": batch, "packing": packing},
                            "layout": {"microbatch": 1}})  # fmt: skip
    held = build_dataset(job.data, job.workload, split="validation")
    step = step_of(job)
    assert step.decoder.training
    loss = compute_eval_loss(step, held, sequences=sequences, device=CPU)
    assert step.decoder.training
    return loss


def step_of(job: TrainJob) -> TrainStep:
    decoder = make_decoder(job.model, job.layout, device=CPU)
    named = decoder.named_parameters()
    optimizer = make_optimizer(named, job.layout, job.optimizer, total_steps=1, seed=0)
    return TrainStep(decoder, optimizer, microbatch=job.layout.microbatch)


@pytest.mark.parametrize("packing", ["none", "concat", "pack"])
def test_the_size_of_a_batch_does_not_matter(tokens: Path, packing: str) -> None:
    alone = loss_with(tokens, 1, 5, packing)
    assert loss_with(tokens, 3, 5, packing) == pytest.approx(alone, rel=1e-6)
    assert loss_with(tokens, 8, 5, packing) == pytest.approx(alone, rel=1e-6)


def test_no_more_is_read_than_the_text_has(tokens: Path) -> None:
    job = tiny_job(tokens)
    held = build_dataset(job.data, job.workload, split="validation")
    assert loss_with(tokens, 4, 10**9) == pytest.approx(loss_with(tokens, 4, held.num_sequences))


class OneOfSeveral:
    """A replica that others run beside; it notes its own sums."""

    def __init__(self, step: TrainStep, replica: tuple[int, int]) -> None:
        self.evaluate, self.replica = step.evaluate, replica
        self.loss_divisor, self.eval_mode, self.discard_eval_stats = (
            step.loss_divisor,
            step.eval_mode,
            step.discard_eval_stats,
        )
        self.sums = torch.zeros(2, dtype=torch.float64)

    def reduce_eval(self, nats: torch.Tensor, tokens: int) -> torch.Tensor:
        self.sums = TrainStep.reduce_eval(nats, tokens)
        return self.sums


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_share_the_batches_and_come_to_the_same_sums(tokens: Path, replicas: int) -> None:
    # Five sequences in batches of two: replicas have different numbers of them, or none.
    job = tiny_job(tokens, {"workload": {"global_batch": 2}, "layout": {"microbatch": 1}})
    held = build_dataset(job.data, job.workload, split="validation")
    several = [OneOfSeveral(step_of(job), (index, replicas)) for index in range(replicas)]
    for one in several:
        compute_eval_loss(one, held, sequences=5, device=CPU)
    nats, count = torch.stack([one.sums for one in several]).sum(0).tolist()
    assert count == 5 * 32
    assert nats / count == pytest.approx(loss_with(tokens, 2, 5), rel=1e-6)
    assert max(float(one.sums[1]) for one in several) < count


def test_it_is_the_mean_over_tokens(tokens: Path) -> None:
    job = tiny_job(tokens)
    held = build_dataset(job.data, job.workload, split="validation")
    step = step_of(job)
    batch = held.get_batch(0)
    logits = step.decoder(batch.tokens_BT).detach()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten())
    found = compute_eval_loss(step, held, sequences=4, device=CPU)
    assert found == pytest.approx(float(expected), rel=1e-5)
