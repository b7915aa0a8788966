"""The first rank of a layout alone, whose partners are played by torch's fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.verify.dry_run import use_fake_process_group
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.step_backend import MeshStepBackend, make_sharded_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

LENGTH = 64
SETTINGS = OptimizerConfig(lr=1e-3, schedule="constant", warmup_steps=0)


class PlayedStep(NamedTuple):
    """A step and what it trains on."""

    step: MeshStepBackend
    batch: TrainBatch


@contextmanager
def played_step(model: Model, layout: Layout, device: str) -> Iterator[PlayedStep]:
    """Make a step of two sequences; what partners would send is whatever this rank sent."""
    with use_fake_process_group(0, layout.gpus):
        spread = make_sharded_model(model, Mesh(layout, device=device))
        sync = make_gradient_sync(spread)
        optimizer = make_optimizer(sync.named_parameters(), layout, SETTINGS, total_steps=100)
        tokens = torch.zeros(2, LENGTH, dtype=torch.int64, device=device)
        whole = SequenceInfo(
            documents=1, max_document_length=LENGTH, num_targets=LENGTH, num_tokens=LENGTH
        )
        batch = TrainBatch(0, tokens, tokens, None, None, (whole, whole))
        yield PlayedStep(MeshStepBackend(spread, sync, optimizer, microbatch=1), batch)
