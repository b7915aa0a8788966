"""How long a checkpoint holds up training, beside torch's own distributed checkpoint.

Each contender runs in a process of its own, so that its peak memory is its own. Run it alone with
`python benchmarks/train_checkpoint.py`, or through `python -m benchmarks.run`.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

NAME = "train_checkpoint"
QUESTION = "How long does a checkpoint hold up training, and how long until it is on the disk?"

LAYERS, HIDDEN = 6, 1024
SAVES = 5
"""The first of each process is told apart: it pays for fresh memory."""
ROUNDS = 2
OURS = "ours"
PEERS = {
    "dcp": "torch dcp.async_save",
    "dcp_cached": "torch dcp.async_save, staging memory kept",
    "torch_save": "torch.save and fsync",
}


def state(layers: int) -> dict[str, Any]:
    """Weights of a small decoder with two moments each, on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (2 * 2816, HIDDEN),
        "down": (HIDDEN, 2816),
        "norm": (HIDDEN,),
    }
    return {
        f"{kind}.layers.{layer}.{name}.weight": torch.randn(shape, device=device)
        for kind in ("model", "moment", "variance")
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def _settle(tensors: dict[str, Any]) -> None:
    """Wait for copies that the GPU still does."""
    import torch

    if next(iter(tensors.values())).is_cuda:
        torch.cuda.synchronize()


class Contender(Protocol):
    """Saves and loads a state."""

    def save(self, step: int, tensors: dict[str, Any]) -> None:
        """Start a save; the tensors may change once this returns."""

    def wait(self) -> None:
        """Wait until it is on the disk."""

    def tidy(self, step: int, /) -> None:
        """Delete all but the last two; not timed."""

    def load(self, tensors: dict[str, Any]) -> None:
        """Load the newest into these tensors."""


class Ours:
    """Our checkpoints with all that they do by default: checksums, commit, policy."""

    def __init__(self, folder: Path) -> None:
        from meshwright.run.train.checkpoint import CheckpointManager

        self._checkpoints = CheckpointManager(folder)

    def save(self, step: int, tensors: dict[str, Any]) -> None:
        """Start a save."""
        self._checkpoints.save(step, tensors, {})

    def wait(self) -> None:
        """Wait until it is on the disk."""
        self._checkpoints.wait()

    def tidy(self, _: int, /) -> None:
        """Do nothing: a save deletes what is too old itself, in its own time."""

    def load(self, tensors: dict[str, Any]) -> None:
        """Load the newest, checksums included."""
        self._checkpoints.load(tensors)


class Dcp:
    """What torch's documentation shows, one folder for each save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saving: Any = None
        self._step = 0

    def save(self, step: int, tensors: dict[str, Any]) -> None:
        """Start a save."""
        import torch.distributed.checkpoint as dcp

        self._step = step
        path = str(self._folder / str(step))
        self._saving = dcp.async_save(  # type: ignore[attr-defined]
            tensors, checkpoint_id=path, async_stager=self._stager()
        )

    def _stager(self) -> Any:
        return None

    def wait(self) -> None:
        """Wait until it is on the disk."""
        self._saving.result()

    def tidy(self, step: int, /) -> None:
        """Delete the save before the last."""
        shutil.rmtree(self._folder / str(step - 2), ignore_errors=True)

    def load(self, tensors: dict[str, Any]) -> None:
        """Load the newest; torch keeps no checksums."""
        import torch.distributed.checkpoint as dcp

        dcp.load(tensors, checkpoint_id=str(self._folder / str(self._step)))  # type: ignore[attr-defined]


class DcpCached(Dcp):
    """The same, with the memory of the copies kept from save to save."""

    def __init__(self, folder: Path) -> None:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder)
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._kept = DefaultStager(options)

    def _stager(self) -> Any:
        return self._kept


class TorchSave:
    """One file, written while training waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest = folder / "none"

    def save(self, step: int, tensors: dict[str, Any]) -> None:
        """Write everything."""
        import torch

        self._newest = self._folder / f"{step}.pt"
        with self._newest.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def wait(self) -> None:
        """Do nothing: it is on the disk."""

    def tidy(self, step: int, /) -> None:
        """Delete the save before the last."""
        (self._folder / f"{step - 2}.pt").unlink(missing_ok=True)

    def load(self, tensors: dict[str, Any]) -> None:
        """Load it, in place."""
        import torch

        for name, tensor in torch.load(self._newest, weights_only=True, mmap=True).items():
            tensors[name].copy_(tensor)


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    OURS: Ours,
    "dcp": Dcp,
    "dcp_cached": DcpCached,
    "torch_save": TorchSave,
}


def contend(name: str, layers: int, folder: Path) -> dict[str, Any]:
    """Save a few times and load once; return the times and the memory it took."""
    warnings.simplefilter("ignore")  # torch warns that there is one process only
    tensors = state(layers)
    contender = CONTENDERS[name](folder)
    before = _peak_bytes()
    blocked, whole = [], []
    for step in range(SAVES):
        _settle(tensors)
        began = time.perf_counter()
        contender.save(step, tensors)
        _settle(tensors)
        blocked.append(time.perf_counter() - began)
        contender.wait()
        whole.append(time.perf_counter() - began)
        contender.tidy(step)
    grown = _peak_bytes() - before
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    began = time.perf_counter()
    contender.load(tensors)
    _settle(tensors)
    load_s = time.perf_counter() - began
    assert all(bool((tensors[key] == tensor).all()) for key, tensor in expected.items())
    return {
        "first": blocked[0],
        "blocked": blocked[1:],
        "whole": whole[1:],
        "load": load_s,
        "grown_bytes": grown,
        "state_bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def _peak_bytes() -> int:
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _run(name: str, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, str(layers), folder]
        finished = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def measure(quick: bool) -> dict[str, object]:
    """Let the contenders take turns; return the medians."""
    layers = 2 if quick else LAYERS
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(1 if quick else ROUNDS):
        names = list(CONTENDERS) if number % 2 == 0 else list(reversed(CONTENDERS))
        for name in names:
            turns[name].append(_run(name, layers))
    ours = _medians(turns[OURS])
    best = min(_medians(turns[name])["blocked"] for name in PEERS)
    target = {} if quick else {"target": "< 1"}
    figures = [
        *_figures("", ours),
        {"name": "held up / torch's best", "value": ours["blocked"] / best, "unit": "×", **target},
    ]
    peers = [row for name, text in PEERS.items() for row in _figures(text, _medians(turns[name]))]
    gib = turns[OURS][0]["state_bytes"] / 2**30
    return {
        "figures": figures,
        "peers": peers,
        "notes": f"A state of {gib:.2f} GiB in {len(state(1)) * layers} tensors of float32, one "
        "process, on the GPU where there is one. Held up: from the call until training may change "
        "the tensors; on disk: until it is synced. Ours also computes and checks checksums, "
        "commits by a rename and deletes what is too old; torch's peers do none of that. Medians "
        "over processes in turn; the first save of each is apart, as it pays for fresh memory. "
        "Copies and disks suffer from whatever else runs: measure on an idle machine. Loads come "
        "from the page cache.",
    }


def _medians(turns: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "first": statistics.median(turn["first"] for turn in turns),
        "blocked": statistics.median(s for turn in turns for s in turn["blocked"]),
        "whole": statistics.median(s for turn in turns for s in turn["whole"]),
        "load": statistics.median(turn["load"] for turn in turns),
        "memory": statistics.median(turn["grown_bytes"] / turn["state_bytes"] for turn in turns),
    }


def _figures(who: str, found: dict[str, float]) -> list[dict[str, object]]:
    start = f"{who}: " if who else ""
    return [
        {"name": f"{start}held up", "value": 1e3 * found["blocked"], "unit": "ms"},
        {"name": f"{start}held up by the first save", "value": 1e3 * found["first"], "unit": "ms"},
        {"name": f"{start}on disk", "value": found["whole"], "unit": "s"},
        {"name": f"{start}load", "value": found["load"], "unit": "s"},
        {"name": f"{start}peak memory over the state's", "value": found["memory"], "unit": "×"},
    ]


def main() -> None:
    """Measure and print, or be one contender."""
    if len(sys.argv) > 1:
        name, layers, folder = sys.argv[1:]
        print(json.dumps(contend(name, int(layers), Path(folder))))
    else:
        print(json.dumps(measure(quick=False), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
