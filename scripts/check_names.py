"""Check naming rules that ruff and import-linter cannot check: `python -m scripts.check_names`.

    shared class name   a public class name stands in one module of the package only
    wide folder         a folder has at most 20 modules beside `__init__`
    repeated module     a module name stands in at most three folders; `command`, `screen` and
                        `flags` are the shape of every command and may repeat
    hidden module       no module has the name of something else that its package exports, since
                        the export hides the module from `import package.module`

Prints one line for each violation and exits with 1 if there are any.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "meshwright"
MAX_MODULES = 20
MAX_FOLDERS = 3
SHAPE_OF_COMMANDS = frozenset({"command", "screen", "flags"})


def list_modules(package: Path) -> list[Path]:
    """Return the modules of a package and of its subpackages, without `__init__` and `__main__`."""
    return [path for path in sorted(package.rglob("*.py")) if not path.stem.startswith("__")]


def find_shared_classes(package: Path) -> Iterator[str]:
    """Yield public class names that more than one module defines."""
    modules_by_class = defaultdict[str, list[str]](list)
    for path in sorted(package.rglob("*.py")):
        names = {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        }
        for name in sorted(names):
            modules_by_class[name].append(path.relative_to(package).as_posix())
    for name, modules in sorted(modules_by_class.items()):
        if len(modules) > 1:
            yield f"shared class name: {name} in {', '.join(modules)}; name each by its subject"


def find_wide_folders(package: Path) -> Iterator[str]:
    """Yield folders with too many modules."""
    modules_by_folder = defaultdict[Path, int](int)
    for path in list_modules(package):
        modules_by_folder[path.parent] += 1
    for folder, count in sorted(modules_by_folder.items()):
        if count > MAX_MODULES:
            name = folder.relative_to(package).as_posix()
            yield f"wide folder: {name} has {count} modules, {MAX_MODULES} are allowed; split it"


def find_repeated_modules(package: Path) -> Iterator[str]:
    """Yield module names that stand in too many folders."""
    folders_by_module = defaultdict[str, list[str]](list)
    for path in list_modules(package):
        folders_by_module[path.stem].append(path.parent.relative_to(package).as_posix())
    for name, folders in sorted(folders_by_module.items()):
        if len(folders) > MAX_FOLDERS and name not in SHAPE_OF_COMMANDS:
            yield f"repeated module: {name} in {', '.join(folders)}; name each by its subject"


def find_hidden_modules(package: Path) -> Iterator[str]:
    """Yield modules and subpackages that an export of their package hides."""
    for init in sorted(package.rglob("__init__.py")):
        for name in sorted(_read_exports(init)):
            path = init.parent / name
            if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
                folder = init.parent.relative_to(package).as_posix()
                yield f"hidden module: {folder} exports {name}, which is also a module; rename one"


def _read_exports(init: Path) -> set[str]:
    """Return the names in `__all__` that are not modules of the package themselves."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    exports, modules = set[str](), set[str]()
    package = ".".join(init.parent.parts[init.parent.parts.index("meshwright") :])
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                exports = set(ast.literal_eval(value))
            case ast.ImportFrom(module=source, names=names) if source == package:
                modules |= {alias.name for alias in names}
            case _:
                pass
    return exports - modules


def find_violations(package: Path) -> list[str]:
    """Return every violation of the naming rules."""
    checks = (find_shared_classes, find_wide_folders, find_repeated_modules, find_hidden_modules)
    return [violation for check in checks for violation in check(package)]


def main() -> int:
    """Print the violations; return the exit code."""
    violations = find_violations(PACKAGE)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
