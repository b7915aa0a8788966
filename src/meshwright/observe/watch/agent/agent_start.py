"""Begins to watch a process, once it has imported torch."""
# ruff: noqa: TID252 - loaded under another name in the job, see the package

import atexit
import importlib
import json
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from .error_log import ErrorLog
from .flight_recorder_env import build_flight_recorder_env
from .profiler_guard import keep_cupti_for_graphs
from .stack_signal import register_stack_signal
from .watch_agent import WatchAgent

_WATCHED: list[WatchAgent] = []


def start_agent(folder: str, torch: Any) -> None:
    """Say that this process is here, and hear of its steps from now on."""
    log = ErrorLog(os.path.join(folder, "log.txt"))  # noqa: PTH118
    try:
        watched = WatchAgent(folder, torch, log)
        flight = os.path.join(folder, "flight")  # noqa: PTH118
        os.environ.update(build_flight_recorder_env(os.environ, str(torch.__version__), flight))
        keep_cupti_for_graphs(torch)
        _announce(folder, torch)
        _hear_steps(torch, watched)
        _hear_replays(torch, watched)
        _WATCHED.append(watched)
        atexit.register(watched.on_exit)
        os.register_at_fork(after_in_child=watched.on_fork)
    except Exception:  # noqa: BLE001 - the job goes on unwatched
        log.write("could not begin to watch")


def _announce(folder: str, torch: Any) -> None:
    pid = os.getpid()
    stem = os.path.join(folder, "agents", str(pid))  # noqa: PTH118
    said = {
        "pid": pid,
        "rank": _number("RANK"),
        "local_rank": _number("LOCAL_RANK"),
        "main_thread": threading.main_thread().ident,
        "signal": register_stack_signal(f"{stem}.stacks"),
        "torch": str(torch.__version__),
    }
    part = f"{stem}.part"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, json.dumps(said).encode())
    finally:
        os.close(handle)
    os.replace(part, f"{stem}.json")  # noqa: PTH105


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _hear_steps(torch: Any, watched: WatchAgent) -> None:
    is_compiling = torch.compiler.is_compiling

    def after_step(optimizer: Any, _args: Any, _words: Any) -> None:
        # Dynamo traces hooks of a compiled optimizer; it takes this for true and leaves the rest.
        if not is_compiling():
            watched.on_optimizer_step(id(optimizer))

    # `torch.optim` takes the name of this module back, but the module is loaded.
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_post_hook(after_step)


def _hear_replays(torch: Any, watched: WatchAgent) -> None:
    graph = getattr(getattr(torch.cuda, "graphs", None), "CUDAGraph", None)
    inner: Callable[..., Any] | None = getattr(graph, "replay", None)
    if graph is None or inner is None:
        return

    @wraps(inner)
    def replay(self: Any) -> Any:
        answer = inner(self)
        watched.on_graph_replay(id(self))
        return answer

    graph.replay = replay


def register_optimizer_class(optimizer: Any) -> None:
    """Hear of the steps of an optimizer class that is none of torch's."""
    inner: Callable[..., Any] = optimizer.step

    @wraps(inner)
    def step(self: Any, *args: Any, **words: Any) -> Any:
        answer = inner(self, *args, **words)
        for watched in _WATCHED:
            watched.on_optimizer_step(id(self))
        return answer

    optimizer.step = step
