"""What Python runs first in every process of a watched job; waits for torch to be imported.

`mw watch` puts this folder first on PYTHONPATH. It takes itself off `sys.path` again, lets the
`sitecustomize` that would have run otherwise run, and costs a process without torch one look at
the names of its imports: it imports next to nothing itself. Nothing here may fail a process.
"""

from __future__ import annotations

import os
import sys

# Loaded already, unlike `importlib.machinery`.
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Tell = Callable[[ModuleType], None]

PACKAGE = "_meshwright_watch"
TORCH = "torch"
MESHWRIGHT_OPTIMIZER = "meshwright.run.train.optimizer.optimizer"
"""Of `mw train`, which is none of torch's optimizers and tells no hook of its steps."""


class _NotifyingLoader:
    """A loader that tells when its module has been run, and is not to be seen afterwards."""

    def __init__(self, inner: Loader, tell: Tell) -> None:
        self._inner, self._tell = inner, tell

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by its own loader, then tell."""
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        try:
            self._tell(module)
        except Exception:  # noqa: BLE001 - a watched process must never fail from being watched
            return


class _ImportWatcher:
    """Finds nothing itself; has the modules it waits for tell when they are there."""

    def __init__(self, told: dict[str, Tell]) -> None:
        self._told = told

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that tells."""
        tell = self._told.get(fullname)
        if tell is None:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _NotifyingLoader(spec.loader, tell)  # type: ignore[assignment, arg-type]
                return spec
        return None


def _load_agent(inject: str) -> ModuleType:
    """Load the agent from the folder above this one."""
    import importlib.util

    if PACKAGE not in sys.modules:
        home = os.path.dirname(inject)  # noqa: PTH120 - pathlib is not imported yet
        first = os.path.join(home, "__init__.py")  # noqa: PTH118
        spec = importlib.util.spec_from_file_location(
            PACKAGE, first, submodule_search_locations=[home]
        )
        if spec is None or spec.loader is None:
            raise ImportError(PACKAGE)
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.agent_start")


def _run_theirs() -> None:
    """Run the `sitecustomize` that this one stands before, under its own name."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    import importlib.util

    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _begin() -> None:
    inject = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != inject]  # noqa: PTH100
    folder = os.environ.get("MESHWRIGHT_WATCH", "")
    if folder and os.path.isdir(folder):  # noqa: PTH112
        told: dict[str, Tell] = {
            TORCH: lambda torch: _load_agent(inject).start_agent(folder, torch),
            MESHWRIGHT_OPTIMIZER: lambda module: _load_agent(inject).register_optimizer_class(
                module.Optimizer
            ),
        }
        sys.meta_path.insert(0, _ImportWatcher(told))
    _run_theirs()


_begin()
