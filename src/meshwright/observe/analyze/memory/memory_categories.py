"""What memory is for, told by the stack that asked for it and by how long it lived.

    optimizer    asked for inside an optimizer, and still there when its step was over
    gradients    asked for in backward, and still there when backward was over
    activations  asked for in forward or for the loss, and given back in backward (or still there)
    parameters   asked for while a module was made, moved or loaded, and there after it
    temporary    given back in the phase that asked for it
    unknown      without a stack, or with one that says none of this

Rules by names are guesses about other people's code: what no rule knows is called unknown.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import NO_EVENT, AllocationLifetimes
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import StackFrame
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    OOM,
    MemorySnapshot,
    Numbers,
)

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "unknown")
_CODE = {name: code for code, name in enumerate(CATEGORIES)}
_NONE, _OTHER, _INIT, _FORWARD, _BACKWARD, _OPTIMIZER = range(6)
_KEPT_ON = -1
_INIT_NAMES = frozenset(
    {"__init__", "_apply", "to", "cuda", "load_state_dict", "reset_parameters", "materialize",
     "to_empty", "_load_from_state_dict", "from_pretrained"}
)  # fmt: skip
_FORWARD_NAMES = frozenset({"forward", "_call_impl", "_wrapped_call_impl", "__call__"})
_OPTIMIZER_FILES = ("/torch/optim/", "\\torch\\optim\\", "optimizer", "/optim/", "adam", "muon")
_BACKWARD_NAMES = ("autograd::Engine::", "backward", "_engine_run_backward", "AccumulateGrad")
NO_STACK = "no stack (not recorded, or older than the recording)"
_NODE = "torch::autograd::generated::"
_OWN_NOT = ("site-packages", "dist-packages", "<frozen", "<string>", "/torch/", "\\torch\\", "??")


class MemorySource(NamedTuple):
    """Live memory of one line of code."""

    line: str
    category: str
    size_bytes: int
    num_tensors: int


_STEPS, _GOES_BACK, _MAKES, _GOES_ON, _IS_MODULE = 1, 2, 4, 8, 16


def _sign(frame: StackFrame) -> int:
    """Say what one line of a stack tells, as bits."""
    found = _GOES_BACK if any(part in frame.name for part in _BACKWARD_NAMES) else 0
    if frame.file.endswith(".py"):
        found |= _STEPS if _in_optimizer(frame) else 0
        found |= _MAKES if frame.name in _INIT_NAMES else 0
        found |= _GOES_ON if frame.name == "forward" else 0
        found |= _IS_MODULE if frame.name in _FORWARD_NAMES else 0
    return found


def _phase(signs: Sequence[int]) -> int:
    if not signs:
        return _NONE
    told = reduce(or_, signs)
    if told & _STEPS:
        return _OPTIMIZER
    if told & _GOES_BACK:
        return _BACKWARD
    if told & _MAKES and not told & _GOES_ON:
        return _INIT
    return _FORWARD if told & _IS_MODULE else _OTHER


def _in_optimizer(frame: StackFrame) -> bool:
    file = frame.file.lower()
    if not any(part in file for part in _OPTIMIZER_FILES):
        return False
    return (
        "step" in frame.name
        or "_init_group" in frame.name
        or "wrapper" in frame.name
        or ("/torch/optim/" in file)
    )


def classify_phases(snapshot: MemorySnapshot) -> Numbers:
    """Return the phase of each stack of a snapshot.

    Where only Python was recorded, an empty stack is a thread without Python: autograd's engine.
    """
    signs = [_sign(frame) for frame in snapshot.frames]
    found = np.array([_phase([signs[n] for n in stack]) for stack in snapshot.stacks], np.int64)
    if snapshot.frames and all(frame.file.endswith(".py") for frame in snapshot.frames):
        found[0] = _BACKWARD
    return found


def has_complete_steps(phase: Numbers) -> bool:
    """Tell whether a stretch of allocations goes through forward and what follows it."""
    return bool((phase == _FORWARD).any() and (phase >= _BACKWARD).any())


def find_optimizer_steps(phase: Numbers) -> Numbers:
    """Return where in a sequence of phases an optimizer begins, each time after a forward."""
    rows = np.flatnonzero((phase == _OPTIMIZER) | (phase == _FORWARD))
    steps = phase[rows] == _OPTIMIZER
    begins = steps.copy()
    begins[1:] &= ~steps[:-1]
    found: Numbers = rows[begins]
    return found


class CategorizedMemory(NamedTuple):
    """A snapshot with what each piece of its memory is for."""

    snapshot: MemorySnapshot
    lifetimes: AllocationLifetimes
    phase: Numbers
    """Of each stack."""
    category: Numbers
    """Of each allocation: an index into `CATEGORIES`."""
    block_category: Numbers
    """Of each block that is still held."""


_KEPT = ("unknown", "unknown", "parameters", "activations", "gradients", "optimizer")
"""What memory is that is still held, by the phase that asked for it."""


def categorize_memory(snapshot: MemorySnapshot, lives: AllocationLifetimes) -> CategorizedMemory:
    """Say what every allocation and block is for."""
    phase = classify_phases(snapshot)
    held = phase.copy()
    held[0] = _NONE  # a block older than the recording has no stack either
    codes = np.array([_CODE[name] for name in _KEPT], np.int64)
    blocks = codes[held[snapshot.blocks.stack]]
    return CategorizedMemory(
        snapshot, lives, phase, classify_allocations(snapshot, lives, phase), blocks
    )


def classify_allocations(
    snapshot: MemorySnapshot, lives: AllocationLifetimes, phase: Numbers
) -> Numbers:
    """Return the category of each allocation, as an index into `CATEGORIES`."""
    made = phase[lives.stack]
    ended = _end_phases(snapshot, lives, phase)
    kept = ended == _KEPT_ON
    found = np.full(made.size, _CODE["unknown"], np.int64)
    # State of an optimizer goes when its owner does: outside of any step of it.
    found[made == _OPTIMIZER] = _CODE["optimizer"]
    found[(made == _OPTIMIZER) & (ended == _OPTIMIZER)] = _CODE["temporary"]
    found[made == _BACKWARD] = _CODE["temporary"]
    # zero_grad lets gradients go inside the optimizer's file, or in the user's loop.
    after = (ended == _OPTIMIZER) | (ended == _OTHER)
    found[(made == _BACKWARD) & (kept | after)] = _CODE["gradients"]
    found[made == _FORWARD] = _CODE["temporary"]
    found[(made == _FORWARD) & (kept | (ended == _BACKWARD))] = _CODE["activations"]
    found[made == _INIT] = _CODE["parameters"]
    found[(made == _INIT) & (ended == _INIT)] = _CODE["temporary"]
    # A loss is often computed in the user's loop, outside of any module.
    found[(made == _OTHER) & (ended == _BACKWARD)] = _CODE["activations"]
    return found


def _end_phases(snapshot: MemorySnapshot, lives: AllocationLifetimes, phase: Numbers) -> Numbers:
    """Return the phase that gave each allocation back, `_KEPT_ON` where none did.

    A failed request unwinds the stack: what was live then was not given back by its phase. Where
    frees were recorded without stacks, the allocation before a free tells the phase.
    """
    events = snapshot.events
    ended_by = np.where(
        lives.free_requested_event != NO_EVENT, lives.free_requested_event, lives.free_event
    )
    failed = np.flatnonzero(events.action == OOM)
    if failed.size:
        after = np.searchsorted(failed, lives.alloc_event)
        fails = failed[np.clip(after, 0, failed.size - 1)]
        cut = (after < failed.size) & (ended_by > fails) & (events.device[fails] == lives.device)
        ended_by = np.where(cut, NO_EVENT, ended_by)
    found = np.full(lives.alloc_event.size, _KEPT_ON, np.int64)
    gone = ended_by != NO_EVENT
    if gone.any() and not events.stack[ended_by[gone]].any() and lives.stack.any():
        before = np.searchsorted(lives.alloc_event, ended_by[gone]) - 1
        found[gone] = phase[lives.stack[before]]
    else:
        found[gone] = phase[events.stack[ended_by[gone]]]
    return found


def find_user_line(stack: tuple[StackFrame, ...]) -> str:
    """Return the innermost line of the user's code, else of any Python code, else an operation."""
    python = [frame for frame in stack if frame.file.endswith(".py")]
    own = [f for f in python if not any(part in f.file for part in _OWN_NOT)]
    for frame in own or python:
        return f"{frame.file}:{frame.line} {frame.name}"
    for frame in stack:
        if _NODE in frame.name and "Backward" in frame.name:
            node = frame.name.partition(_NODE)[2].partition("::")[0].partition("(")[0]
            return f"{node} of autograd (no Python stack)"
    return "no Python stack" if stack else ""


def sum_by_line(
    snapshot: MemorySnapshot, stack: Numbers, category: Numbers, size_bytes: Numbers
) -> tuple[MemorySource, ...]:
    """Sum memory by the user's line and category, largest first."""
    summed: dict[tuple[str, int], list[int]] = {}
    keys, index = np.unique(np.stack([stack, category], axis=1), axis=0, return_inverse=True)
    weight = np.zeros(len(keys), np.int64)
    np.add.at(weight, index.ravel(), size_bytes)
    count = np.bincount(index.ravel(), minlength=len(keys))
    for (number, kind), size, times in zip(
        keys.tolist(), weight.tolist(), count.tolist(), strict=True
    ):
        line = find_user_line(snapshot.get_stack(number)) or NO_STACK
        both = summed.setdefault((line, kind), [0, 0])
        both[0] += size
        both[1] += times
    found = [MemorySource(line, CATEGORIES[kind], a, b) for (line, kind), (a, b) in summed.items()]
    return tuple(sorted(found, key=lambda each: (-each.size_bytes, each.line)))
