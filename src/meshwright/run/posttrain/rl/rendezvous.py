"""How the ranks of a loop find each other, and what keeps them from it is told to all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.world import World, read_world
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.serve.engine.runner_builder import resolve_device
from meshwright.run.train.distributed_init import find_rank_count_problems, form_mesh
from meshwright.run.train.run_folder.run_state import flatten_values
from meshwright.spec.field_checks import raise_problems
from meshwright.spec.layout import Layout


def read_process_world() -> World:
    """Return the place of this process among those of its run."""
    return read_world(os.environ)


def is_distributed(settings: RLConfig) -> bool:
    """Tell whether several ranks train, by the layout or by how many were started."""
    return settings.layout.gpus > 1 or read_process_world().size > 1


def build_trainer_layout(settings: RLConfig, device: str) -> Layout:
    """Return the trainer's layout on a kind of device, with the precision of the run."""
    precision = settings.precision or ("bf16" if device == "cuda" else "fp32")
    return msgspec.structs.replace(settings.layout, precision=precision)


@contextmanager
def rendezvous(settings: RLConfig, problems: Sequence[Problem] = ()) -> Iterator[Mesh]:
    """Meet the other ranks, or be refused with all of them where one has `problems`."""
    kind, found = "cpu", list(problems)
    try:
        kind = resolve_device(settings.device).type
    except InputError as refusal:
        found += refusal.problems
    same = dict(flatten_values(msgspec.to_builtins(settings)))
    folder = Path(settings.folder) if settings.folder else None
    with form_mesh(
        read_process_world(), build_trainer_layout(settings, kind), kind,
        same=same, problems=found, folder=folder, timeout_s=settings.stall_timeout_s,
    ) as mesh:  # fmt: skip
        yield mesh


@contextmanager
def report_failure_to_all(settings: RLConfig) -> Iterator[None]:
    """Let what keeps this process from running be told to all ranks, who are refused with it."""
    try:
        raise_problems(
            find_rank_count_problems(settings.layout, read_process_world())
        )  # before anything is written down
        yield
    except InputError as refusal:
        if read_process_world().size > 1:
            with rendezvous(settings, refusal.problems):
                pass
        raise
