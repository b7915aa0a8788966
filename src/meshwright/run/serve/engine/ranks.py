"""Tensor parallel: one process decides, those of the other ranks carry out the same orders.

The first rank sends its orders over sockets of this machine; the ranks meet in the model's own
collectives. All of them draw, from the same logits with the same seeds, so no token has to travel.
When a rank ends, the first one ends too, and whoever started it starts all anew.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.serve.engine.build import Clock, build_runner, device_of
from meshwright.run.serve.engine.doing import Do, Doer, Does
from meshwright.run.serve.engine.orders import Orders
from meshwright.run.serve.engine.runner import Computed, Landing, Runner
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.framing import Frames, framed
from meshwright.run.serve.sampling.telling import Told
from meshwright.spec.layout import Layout
from meshwright.spec.layout.check import tensor_problems
from meshwright.spec.model import Model

_LOOPBACK = "127.0.0.1"
_MEETING_S = 120.0
_LEAVING_S = 0.2
_PATIENCE = timedelta(days=7)
"""How long a rank waits for the others: between requests nobody comes."""


class Place(msgspec.Struct, frozen=True, tag="place"):
    """What a rank is told first."""

    rank: int
    port: int
    source: str | Model
    settings: EngineSettings
    ends: tuple[int, ...]


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Carry out everything but the drawing."""

    orders: Orders


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Draw from what was computed last."""

    mask: bytes = b""
    """int32 words that say which tokens grammars allow; empty where there are none."""
    lines: int = 0


Said = Place | Compute | Draw | Do
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Said)


class Ranks(NamedTuple):
    """What the ranks of an engine do between its steps; the first one's process says so."""

    module: str
    """Run for each of the others: it calls `follow`."""
    doer: Callable[[Runner, EngineSettings], Does]


class Followers:
    """The other ranks, as the first one sees them."""

    def __init__(
        self,
        source: str | Model,
        settings: EngineSettings,
        ends: tuple[int, ...],
        module: str,
    ) -> None:
        """Start them, and meet them in a process group."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        store = TCPStore(_LOOPBACK, 0, settings.tp, True, timedelta(seconds=_MEETING_S), False)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            path = str(Path(folder) / "rank")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
                listening.bind(path)
                listening.listen(settings.tp)
                listening.settimeout(_MEETING_S)
                for rank in range(1, settings.tp):
                    command = [sys.executable, "-m", module, path]
                    self._processes.append(subprocess.Popen(command))
                    self._sockets.append(_accepted(listening))
                    place = Place(rank, store.port, source, settings, ends)
                    self._sockets[-1].sendall(framed(_encoder.encode(place)))
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.mesh = _joined(store, 0, settings)
        atexit.register(self._leave)

    def tell(self, said: Said) -> None:
        """Tell all of them the same."""
        frame = framed(_encoder.encode(said))
        for each in self._sockets:
            each.sendall(frame)

    def _leave(self) -> None:
        """Let the others go, when this process ends by itself."""
        self._leaving.set()
        for each in self._sockets:
            each.close()
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
            # Its threads need the interpreter to let go of the last sum's tensors. Who comes for
            # that when the interpreter has gone aborts the process.
            time.sleep(_LEAVING_S)

    def _watch(self) -> None:
        """End this process with the first that ends: it cannot go on alone."""
        while not self._leaving.is_set() and all(
            process.poll() is None for process in self._processes
        ):
            self._leaving.wait(0.2)
        if not self._leaving.is_set():
            os.kill(os.getpid(), signal.SIGKILL)


class Leading:
    """The runner of the first rank: what it does, all do."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner, self._followers = runner, followers
        self.ranks = followers.mesh.layout.tp
        self.forward, self.cache, self.adapters = runner.forward, runner.cache, runner.adapters

    @property
    def told(self) -> list[Told]:
        """How likely tokens of prompts were in the last step."""
        return self._runner.told

    def compute(self, orders: Orders) -> Computed | None:
        """Carry out everything but the drawing; None where nobody draws."""
        self._followers.tell(Compute(orders))
        return self._runner.compute(orders)

    def draw(self, computed: Computed, mask_LW: Tensor | None = None) -> Landing:
        """Draw a token for each line of what was computed."""
        if mask_LW is None:
            self._followers.tell(Draw())
        else:
            words = mask_LW.cpu().numpy().tobytes()
            self._followers.tell(Draw(words, len(mask_LW)))
        return self._runner.draw(computed, mask_LW)


def doer_of(runner: Runner, settings: EngineSettings) -> Doer:
    """Return what does things between the steps of a runner."""
    limits = settings.limits
    return Doer(
        runner,
        graphs=settings.graphs,
        batch_tokens=limits.batch_tokens,
        rows=limits.batch_requests,
    )


SERVED = Ranks("meshwright.run.serve.engine.rank", doer_of)


def follow(path: str, ranks: Ranks = SERVED) -> None:
    """Be a rank that carries out what the first one says, until that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(path)
    frames, runner, doer, computed = Frames(), None, None, None
    while data := way.recv(1 << 20):
        for body in frames.add(data):
            said = _decoder.decode(body)
            match said:
                case Place():
                    runner = _made(said)
                    doer = ranks.doer(runner, said.settings)
                case Compute(orders):
                    assert runner is not None
                    computed = runner.compute(orders)
                case Draw(mask, lines):
                    assert runner is not None
                    assert computed is not None
                    runner.draw(computed, _mask(mask, lines, runner.cache.device))
                case Do():
                    assert doer is not None
                    doer(said)
    os._exit(0)


def _made(place: Place) -> Runner:
    settings = place.settings
    store = TCPStore(
        _LOOPBACK, place.port, settings.tp, False, timedelta(seconds=_MEETING_S), False
    )
    mesh = _joined(store, place.rank, settings)
    return build_runner(place.source, settings, place.ends, Clock(), mesh)


def _joined(store: TCPStore, rank: int, settings: EngineSettings) -> Mesh:
    """Join the process group; return the rank's place in it."""
    device = device_of(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.tp,
        timeout=_PATIENCE,
    )
    layout = Layout(tp=settings.tp, precision="bf16" if device.type == "cuda" else "fp32")
    return Mesh(layout, device=device)


def _accepted(listening: socket.socket) -> socket.socket:
    try:
        connection, _ = listening.accept()
    except TimeoutError:
        what = f"a rank has not come within {_MEETING_S:.0f} s"
        raise MissingPart(what, "look at its last words above") from None
    connection.settimeout(None)
    return connection


def _mask(mask: bytes, lines: int, device: torch.device) -> Tensor | None:
    if not mask:
        return None
    words = np.frombuffer(mask, np.int32).reshape(lines, -1).copy()
    return torch.from_numpy(words).to(device)


def check_ranks(model: Model, settings: EngineSettings) -> None:
    """Raise where an engine of several ranks cannot be what is asked."""
    if settings.tp == 1:
        return
    problems = list(dict.fromkeys(tensor_problems(settings.tp, model)))
    if settings.adapters or settings.own_adapter is not None:
        what = "adapters are served on one device"
        problems.append(Problem("adapters", what, "use tp=1, or no adapters"))
    if settings.draft:
        what = "a draft is served on one device, beside its model"
        problems.append(Problem("draft", what, "use tp=1, or guesses without a draft"))
    if settings.invariant:
        what = "sums over ranks are cut by the size of the batch"
        problems.append(Problem("invariant", what, "use tp=1, or leave it out"))
    if problems:
        raise InputError(problems)
