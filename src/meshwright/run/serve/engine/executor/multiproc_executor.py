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

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.parallel.launch.store_server import (
    LOOPBACK,
    open_store_server,
    use_loopback_interface,
)
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.executor.rank_commands import (
    RankCommand,
    RankCommandHandler,
    ServingCommandHandler,
)
from meshwright.run.serve.engine.model_input import ModelInput
from meshwright.run.serve.engine.model_runner.model_runner import (
    ModelRunner,
    PendingOutput,
    StepLogits,
)
from meshwright.run.serve.engine.runner_builder import StartupTimer, build_runner, resolve_device
from meshwright.run.serve.frame_codec import FrameDecoder, encode_frame
from meshwright.run.serve.sampling.sampled_logprobs import SampledLogprobs
from meshwright.spec.layout import Layout
from meshwright.spec.layout.constraints import check_tensor_parallel
from meshwright.spec.model import Model

_MEETING_S = 120.0
_LEAVING_S = 0.2
_PATIENCE = timedelta(days=7)
"""How long a rank waits for the others: between requests nobody comes."""


class RankStart(msgspec.Struct, frozen=True, tag="place"):
    """What a rank is told first."""

    rank: int
    port: int
    source: str | Model
    config: EngineConfig
    eos_token_ids: tuple[int, ...]


class ExecuteModelMessage(msgspec.Struct, frozen=True, tag="compute"):
    """Carry out everything but the drawing."""

    model_input: ModelInput


class SampleTokensMessage(msgspec.Struct, frozen=True, tag="draw"):
    """Draw from what was computed last."""

    grammar_bitmask: bytes = b""
    """int32 words that say which tokens grammars allow; empty where there are none."""
    num_logit_rows: int = 0


RankMessage = RankStart | ExecuteModelMessage | SampleTokensMessage | RankCommand
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RankMessage)


class RankEntryPoint(NamedTuple):
    """What the ranks of an engine do between its steps; the first one's process says so."""

    module: str
    """Run for each of the others: it calls `run_follower_rank`."""
    create_handler: Callable[[ModelRunner, EngineConfig], RankCommandHandler]


class FollowerRanks:
    """The other ranks, as the first one sees them."""

    def __init__(
        self,
        source: str | Model,
        settings: EngineConfig,
        ends: tuple[int, ...],
        module: str,
    ) -> None:
        """Start them, and meet them in a process group."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        store = open_store_server(world_size=settings.tensor_parallel_size, timeout_s=_MEETING_S)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            path = str(Path(folder) / "rank")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
                listening.bind(path)
                listening.listen(settings.tensor_parallel_size)
                listening.settimeout(_MEETING_S)
                for rank in range(1, settings.tensor_parallel_size):
                    command = [sys.executable, "-m", module, path]
                    self._processes.append(subprocess.Popen(command))
                    self._sockets.append(_accepted(listening))
                    place = RankStart(rank, store.port, source, settings, ends)
                    self._sockets[-1].sendall(encode_frame(_encoder.encode(place)))
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.mesh = _joined(store, 0, settings)
        atexit.register(self._leave)

    def broadcast(self, said: RankMessage) -> None:
        """Tell all of them the same."""
        frame = encode_frame(_encoder.encode(said))
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


class MultiprocExecutor:
    """The runner of the first rank: what it does, all do."""

    def __init__(self, runner: ModelRunner, followers: FollowerRanks) -> None:
        self._runner, self._followers = runner, followers
        self.tensor_parallel_size = followers.mesh.layout.tp
        self.model, self.kv_cache, self.lora_manager = (
            runner.model,
            runner.kv_cache,
            runner.lora_manager,
        )

    @property
    def prompt_logprobs(self) -> list[SampledLogprobs]:
        """How likely tokens of prompts were in the last step."""
        return self._runner.prompt_logprobs

    def execute_model(self, orders: ModelInput) -> StepLogits | None:
        """Carry out everything but the drawing; None where nobody draws."""
        self._followers.broadcast(ExecuteModelMessage(orders))
        return self._runner.execute_model(orders)

    def sample_tokens(self, computed: StepLogits, mask_LW: Tensor | None = None) -> PendingOutput:
        """Draw a token for each line of what was computed."""
        if mask_LW is None:
            self._followers.broadcast(SampleTokensMessage())
        else:
            words = mask_LW.cpu().numpy().tobytes()
            self._followers.broadcast(SampleTokensMessage(words, len(mask_LW)))
        return self._runner.sample_tokens(computed, mask_LW)


def create_command_handler(runner: ModelRunner, settings: EngineConfig) -> ServingCommandHandler:
    """Return what does things between the steps of a runner."""
    limits = settings.scheduler_config
    return ServingCommandHandler(
        runner,
        graphs=settings.cuda_graphs,
        batch_tokens=limits.max_num_batched_tokens,
        rows=limits.max_num_seqs,
    )


SERVING_RANKS = RankEntryPoint(
    "meshwright.run.serve.engine.executor.__main__", create_command_handler
)


def run_follower_rank(path: str, ranks: RankEntryPoint = SERVING_RANKS) -> None:
    """Be a rank that carries out what the first one says, until that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(path)
    frames, runner, doer, computed = FrameDecoder(), None, None, None
    while data := way.recv(1 << 20):
        for body in frames.feed(data):
            said = _decoder.decode(body)
            match said:
                case RankStart():
                    runner = _made(said)
                    doer = ranks.create_handler(runner, said.config)
                case ExecuteModelMessage(orders):
                    assert runner is not None
                    computed = runner.execute_model(orders)
                case SampleTokensMessage(mask, lines):
                    assert runner is not None
                    assert computed is not None
                    runner.sample_tokens(computed, _mask(mask, lines, runner.kv_cache.device))
                case RankCommand():
                    assert doer is not None
                    doer(said)
    os._exit(0)


def _made(place: RankStart) -> ModelRunner:
    settings = place.config
    store = TCPStore(
        LOOPBACK,
        place.port,
        settings.tensor_parallel_size,
        is_master=False,
        timeout=timedelta(seconds=_MEETING_S),
        wait_for_workers=False,
    )
    mesh = _joined(store, place.rank, settings)
    return build_runner(place.source, settings, place.eos_token_ids, StartupTimer(), mesh)


def _joined(store: TCPStore, rank: int, settings: EngineConfig) -> Mesh:
    """Join the process group; return the rank's place in it."""
    device = resolve_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_loopback_interface()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.tensor_parallel_size,
        timeout=_PATIENCE,
    )
    layout = Layout(
        tp=settings.tensor_parallel_size, precision="bf16" if device.type == "cuda" else "fp32"
    )
    return Mesh(layout, device=device)


def _accepted(listening: socket.socket) -> socket.socket:
    try:
        connection, _ = listening.accept()
    except TimeoutError:
        what = f"a rank has not come within {_MEETING_S:.0f} s"
        raise MissingDependency(what, "look at its last words above") from None
    connection.settimeout(None)
    return connection


def _mask(mask: bytes, lines: int, device: torch.device) -> Tensor | None:
    if not mask:
        return None
    words = np.frombuffer(mask, np.int32).reshape(lines, -1).copy()
    return torch.from_numpy(words).to(device)


def validate_tensor_parallel(model: Model, settings: EngineConfig) -> None:
    """Raise where an engine of several ranks cannot be what is asked."""
    if settings.tensor_parallel_size == 1:
        return
    problems = list(dict.fromkeys(check_tensor_parallel(settings.tensor_parallel_size, model)))
    if settings.lora_modules or settings.trained_lora_slot is not None:
        what = "adapters are served on one device"
        problems.append(Problem("lora_modules", what, "use tensor_parallel_size=1, or no adapters"))
    if settings.speculative_model:
        what = "a draft is served on one device, beside its model"
        problems.append(
            Problem(
                "speculative_model",
                what,
                "use tensor_parallel_size=1, or draft tokens without a draft model",
            )
        )
    if settings.batch_invariant:
        what = "sums over ranks are cut by the size of the batch"
        problems.append(
            Problem("batch_invariant", what, "use tensor_parallel_size=1, or leave it out")
        )
    if problems:
        raise InputError(problems)
