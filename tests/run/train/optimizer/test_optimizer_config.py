"""Settings are read strictly, and every fault is named at once."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.serialization import decode


def test_a_table_is_read() -> None:
    data = {
        "lr": 1e-3,
        "schedule": "wsd",
        "groups": [{"match": "embedding.*", "weight_decay": 0.0}],
    }
    settings = decode(OptimizerConfig, data)
    assert (settings.lr, settings.schedule) == (1e-3, "wsd")
    assert settings.groups[0].lr_mult == 1.0


def test_every_fault_is_listed_with_its_place() -> None:
    data = {
        "lr": -1.0,
        "betas": [0.9, 1.0],
        "min_lr_factor": 2.0,
        "momentum": 1.5,
        "groups": [{"match": "", "weight_decay": 0.1}],
        "grad_scaler": {"backoff_factor": 0.0},
    }
    with pytest.raises(InputError) as caught:
        decode(OptimizerConfig, data, "optimizer")
    places = {problem.where for problem in caught.value.problems}
    assert places >= {
        "optimizer.lr",
        "optimizer.betas[1]",
        "optimizer.min_lr_factor",
        "optimizer.momentum",
        "optimizer.groups[0].match",
        "optimizer.grad_scaler.backoff_factor",
    }


def test_a_mistyped_schedule_is_corrected() -> None:
    with pytest.raises(InputError, match="cosine"):
        decode(OptimizerConfig, {"schedule": "cosin"})


@pytest.mark.parametrize("rate", [-1.0, -3e-4, 0.0, float("nan"), float("inf"), True])
def test_a_learning_rate_that_cannot_be_is_refused_with_a_usual_one(rate: float) -> None:
    with pytest.raises(InputError, match=r"lr: .* \(fix: use a learning rate such as 3e-4\)"):
        OptimizerConfig(lr=rate)
