"""Names of a package that load on first use (PEP 562), so that importing it stays cheap."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_getattr(
    package: str, modules_by_name: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names live in other modules.

    `modules_by_name` gives the module of each name; a name that is a module itself gives its own
    path.
    """

    def load(name: str) -> Any:
        if name not in modules_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = modules_by_name[name]
        module = import_module(home)
        value = module if home.endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(modules_by_name)

    return load, names
