"""How the ranks of a loop find each other, and what keeps them from it is told to all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.environment import World, world_of
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.serve.engine.build import device_of
from meshwright.run.train.joining import meet, wrong_count
from meshwright.run.train.run_state import leaves
from meshwright.spec.bounds import require
from meshwright.spec.layout import Layout


def place() -> World:
    """Return the place of this process among those of its run."""
    return world_of(os.environ)


def is_shared(settings: LoopSettings) -> bool:
    """Tell whether several ranks train, by the layout or by how many were started."""
    return settings.layout.gpus > 1 or place().size > 1


def layout_of(settings: LoopSettings, device: str) -> Layout:
    """Return the trainer's layout on a kind of device, with the precision of the run."""
    precision = settings.precision or ("bf16" if device == "cuda" else "fp32")
    return msgspec.structs.replace(settings.layout, precision=precision)


@contextmanager
def met(settings: LoopSettings, problems: Sequence[Problem] = ()) -> Iterator[Mesh]:
    """Meet the other ranks, or be refused with all of them where one has `problems`."""
    kind, found = "cpu", list(problems)
    try:
        kind = device_of(settings.device).type
    except InputError as refusal:
        found += refusal.problems
    same = dict(leaves(msgspec.to_builtins(settings)))
    folder = Path(settings.folder) if settings.folder else None
    with meet(
        place(), layout_of(settings, kind), kind,
        same=same, problems=found, folder=folder, patience_s=settings.stall_s,
    ) as mesh:  # fmt: skip
        yield mesh


@contextmanager
def told_to_all(settings: LoopSettings) -> Iterator[None]:
    """Let what keeps this process from running be told to all ranks, who are refused with it."""
    try:
        require(wrong_count(settings.layout, place()))  # before anything is written down
        yield
    except InputError as refusal:
        if place().size > 1:
            with met(settings, refusal.problems):
                pass
        raise
