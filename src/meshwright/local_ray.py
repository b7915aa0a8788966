"""`start_local_ray`: a cluster of Ray on this machine that other machines cannot reach.

Ray listens at every address, and whoever reaches it may run code, unless it takes this machine for
one that is in no cluster.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters of several machines, which Linux has on."""
_CONSTANT = "ENABLE_RAY_CLUSTER"
"""What Ray read of it when it was imported."""


def start_local_ray(ray: Any, **options: Any) -> None:
    """Start a cluster of this machine's own and connect to it; processes listen on loopback."""
    # Ray tells its makers about the clusters it starts unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _on_loopback():
        ray.init(address="local", include_dashboard=False, **options)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray use loopback; processes that it starts meanwhile keep to that."""
    constants = import_module("ray._private.ray_constants")
    said, before = os.environ.get(_VARIABLE), getattr(constants, _CONSTANT, None)
    if said is not None:  # the user decides
        yield
        return
    os.environ[_VARIABLE] = "0"
    if before is not None:
        setattr(constants, _CONSTANT, False)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            setattr(constants, _CONSTANT, before)
