"""The first rank of a layout alone, whose partners are played by torch's fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.rehearsal import fake_world
from meshwright.run.parallel.sync import make_sync
from meshwright.run.train.data.batch import Batch, Sequence
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.spread_step import SpreadStep, make_spread
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

LENGTH = 64
SETTINGS = OptimizerSettings(lr=1e-3, schedule="constant", warmup_steps=0)


class PlayedStep(NamedTuple):
    """A step and what it trains on."""

    step: SpreadStep
    batch: Batch


@contextmanager
def played_step(model: Model, layout: Layout, device: str) -> Iterator[PlayedStep]:
    """Make a step of two sequences; what partners would send is whatever this rank sent."""
    with fake_world(0, layout.gpus):
        spread = make_spread(model, Mesh(layout, device=device))
        sync = make_sync(spread)
        optimizer = make_optimizer(sync.named_parameters(), layout, SETTINGS, total_steps=100)
        tokens = torch.zeros(2, LENGTH, dtype=torch.int64, device=device)
        whole = Sequence(documents=1, longest=LENGTH, targets=LENGTH, filled=LENGTH)
        batch = Batch(0, tokens, tokens, None, None, (whole, whole))
        yield PlayedStep(SpreadStep(spread, sync, optimizer, microbatch=1), batch)
