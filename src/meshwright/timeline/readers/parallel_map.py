"""Runs a function over many files, in order and in bounded memory: here, in processes, or on Ray.

On Ray every node reads the files itself, so they lie where all nodes see them under the same path.
The cluster is the one that `RAY_ADDRESS` names or that runs here; where there is none, Ray starts
on this machine.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from meshwright.errors import MissingDependency
from meshwright.local_ray import start_local_ray

Item = TypeVar("Item")
_AHEAD = 2
"""Ray tasks given out for each CPU: one runs, one waits. More would only hold answers in memory."""


def map_in_order(
    function: Callable[[Item], Any], items: Sequence[Item], *, num_workers: int, use_ray: bool
) -> Iterator[tuple[Item, Any]]:
    """What a function says of each item, in their order."""
    if use_ray:
        yield from _on_ray(function, items)
    elif min(num_workers, len(items)) > 1:
        yield from _in_processes(function, items, min(num_workers, len(items)))
    else:
        for item in items:
            yield item, function(item)


def _in_processes(
    function: Callable[[Item], Any], items: Sequence[Item], num_workers: int
) -> Iterator[tuple[Item, Any]]:
    from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
    from multiprocessing import get_context

    # A fork would copy Arrow's threads in an unknown state.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures: list[Future[Any]] = []

        def given(item: Item) -> Future[Any]:
            futures.append(pool.submit(function, item))
            return futures[-1]

        try:
            yield from _some_ahead(given, lambda future: future.result(), items, num_workers + 2)
        except BrokenExecutor:
            hint = f"each of {num_workers} takes the memory of one file: give fewer --num-workers"
            raise MissingDependency("a process that reads was killed", hint) from None
        finally:
            for future in futures:
                future.cancel()


def _on_ray(function: Callable[[Item], Any], items: Sequence[Item]) -> Iterator[tuple[Item, Any]]:
    ray = _ray()
    own = not ray.is_initialized()
    if own:
        _connect(ray)
    try:
        task = ray.remote(_called)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        give = partial(task.remote, function)
        yield from _some_ahead(give, partial(_got, ray), items, _AHEAD * max(1, cpus))
    finally:
        if own:
            ray.shutdown()


def _got(ray: Any, answer: Any) -> Any:
    """A task's answer, or what it raised, as it raised it."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        hint = "look at ray status and ray logs; every node needs meshwright, the files and memory"
        raise MissingDependency(f"Ray lost a task: {error}", hint) from None


def _called(function: Callable[[Item], Any], item: Item) -> Any:
    return function(item)  # Ray takes plain functions only.


def _some_ahead(
    give: Callable[[Item], Any], get: Callable[[Any], Any], items: Iterable[Item], most: int
) -> Iterator[tuple[Item, Any]]:
    """Give out at most so many items before the first answer is taken."""
    waiting: deque[tuple[Item, Any]] = deque()
    for item in items:
        waiting.append((item, give(item)))
        if len(waiting) >= most:
            first, answer = waiting.popleft()
            yield first, get(answer)
    while waiting:
        first, answer = waiting.popleft()
        yield first, get(answer)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        hint = "pip install 'meshwright[ray]', or leave out --ray and use --num-workers N"
        raise MissingDependency("Ray is not installed", hint) from None


def _connect(ray: Any) -> None:
    """Join a running cluster; start one on this machine where there is none."""
    said = os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=said or "auto", **quiet)
    except ConnectionError:
        if said:
            what = f"no Ray cluster answers at RAY_ADDRESS={said}"
            raise MissingDependency(what, "start it with ray start --head, or unset it") from None
        start_local_ray(ray, **quiet)
