"""Settings are read strictly, and every fault is named at once."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.read import read


def test_a_table_is_read() -> None:
    data = {"lr": 1e-3, "schedule": "wsd", "groups": [{"match": "embedding.*", "decay": 0.0}]}
    settings = read(OptimizerSettings, data)
    assert (settings.lr, settings.schedule) == (1e-3, "wsd")
    assert settings.groups[0].lr_share == 1.0


def test_every_fault_is_listed_with_its_place() -> None:
    data = {
        "lr": -1.0,
        "betas": [0.9, 1.0],
        "final_share": 2.0,
        "momentum": 1.5,
        "groups": [{"match": "", "decay": 0.1}],
        "loss_scale": {"backoff": 0.0},
    }
    with pytest.raises(InputError) as caught:
        read(OptimizerSettings, data, "optimizer")
    places = {problem.where for problem in caught.value.problems}
    assert places >= {
        "optimizer.lr",
        "optimizer.betas[1]",
        "optimizer.final_share",
        "optimizer.momentum",
        "optimizer.groups[0].match",
        "optimizer.loss_scale.backoff",
    }


def test_a_mistyped_schedule_is_corrected() -> None:
    with pytest.raises(InputError, match="cosine"):
        read(OptimizerSettings, {"schedule": "cosin"})
