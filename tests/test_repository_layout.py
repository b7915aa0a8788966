"""The layout of the repository: rules that neither ruff, mypy nor import-linter can check."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.result import read_all
from scripts import numbers_page

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "meshwright"
MODULES = sorted(PACKAGE.rglob("*.py"))
ASIDE = sorted(
    path
    for folder in ("benchmarks", "docs", "examples", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if "_build" not in path.parts
)
PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py")

MAX_LINES = 400
LONGER_FOR_A_REASON: frozenset[str] = frozenset()
NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
FIELD_WORDS = {
    "src/meshwright/run/train/checkpoint/manager.py",  # Orbax calls it a CheckpointManager
    "tests/run/train/checkpoint/test_manager.py",
}
"""Modules whose name has such a word because the field uses it."""
TORCH_FREE_PACKAGES = (
    "spec", "policy", "timeline", "predict", "observe", "fleet", "cli", "web",
)  # fmt: skip


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _dotted(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT / "src").parts)


@pytest.mark.parametrize("path", MODULES + ASIDE, ids=_shown)
def test_module_name_says_what_it_holds(path: Path) -> None:
    words = set(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "_").split("_"))
    assert not words & NAMES_THAT_SAY_NOTHING or _shown(path) in FIELD_WORDS


@pytest.mark.parametrize("path", MODULES, ids=_shown)
def test_module_fits_in_a_head(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES or _shown(path) in LONGER_FOR_A_REASON


def test_no_module_is_excused_without_need() -> None:
    long = {_shown(path) for path in MODULES if len(path.read_text().splitlines()) > MAX_LINES}
    assert long >= LONGER_FOR_A_REASON


@pytest.mark.parametrize(
    "path", [path for path in MODULES + ASIDE if ROOT / "tests" not in path.parents], ids=_shown
)
def test_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


WITHOUT_TORCH = """
import importlib, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            # No ImportError: that a module might catch.
            raise AssertionError("torch is imported")
sys.meta_path.insert(0, Refused())
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except AssertionError:
        print(name)
"""


def test_only_run_loads_torch_when_it_is_imported() -> None:
    names = [
        _dotted(path.with_suffix(""))
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] in TORCH_FREE_PACKAGES
        # Python runs this one first in the processes of a watched job, and it changes them.
        and path.name != "sitecustomize.py"
    ]
    loaded = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input="\n".join(names),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert loaded.stdout.split() == []


def _export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order ruff's RUF022 writes."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("folder", PACKAGES, ids=_shown)
def test_exported_names_are_sorted_and_importable(folder: Path) -> None:
    package = importlib.import_module(_dotted(folder))
    names = list(getattr(package, "__all__", []))
    assert names in (sorted(set(names)), sorted(set(names), key=_export_order))
    assert [name for name in names if not hasattr(package, name)] == []


@pytest.mark.parametrize(
    "folder", [folder for folder in PACKAGES if folder.parent == PACKAGE], ids=_shown
)
def test_package_says_what_it_exports(folder: Path) -> None:
    assert getattr(importlib.import_module(_dotted(folder)), "__all__", None) is not None


def test_tests_mirror_the_packages() -> None:
    beside_the_package = {"real", "scripts", "benchmarks", "data"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders - beside_the_package - {"__pycache__"} <= packages


def _tracked_text() -> Iterator[tuple[str, str]]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("needs the git repository, to know which files are part of the project")
    for name in listing.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file():
            data = path.read_bytes()
            if b"\0" not in data[:8000]:
                yield name, data.decode("utf-8", errors="replace")


def _places(pattern: str) -> list[str]:
    seen = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in _tracked_text()
        for number, line in enumerate(text.splitlines(), start=1)
        if seen.search(line)
    ]


def test_no_path_of_a_developers_machine_is_written_down() -> None:
    assert _places(r"(?<![\w.\-])/(?:work|root|home|Users)/[\w.]") == []


def test_no_package_registry_is_written_down() -> None:
    # Written in halves, so that this file does not hold what it forbids.
    halves = [
        ("anaconda", ".org"),
        ("download.pytorch", ".org"),
        ("npmjs", ".org"),
        ("opt/", "pypi"),
        ("opt/", "wheels"),
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
    ]
    assert _places("|".join(re.escape(start + end) for start, end in halves)) == []


def _modules_after(code: str) -> set[str]:
    """Names in sys.modules after running `code` in a fresh interpreter."""
    tell = "import sys; sys.stderr.write('\\n'.join(['#modules', *sys.modules]))"
    fresh = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(fresh.stderr.partition("#modules\n")[2].split("\n"))


HEAVY = {"duckdb", "numpy", "pandas", "polars", "pyarrow", "rich", "torch", "yaml"}
HELP = """
import runpy, sys
sys.argv = ["mw", "--help"]
try:
    runpy.run_module("meshwright", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
"""


# Counting modules instead of seconds keeps these steady on a busy machine. For scale, on
# Python 3.11: typing brings 20 modules, argparse 21, msgspec 63, importlib.metadata 102. So the
# first bound says "names are lazy", and the second "a parser, nothing else".
def test_import_meshwright_loads_few_modules() -> None:
    loaded = _modules_after("import meshwright") - _modules_after("pass")
    assert not HEAVY & loaded
    assert len(loaded) <= 40, sorted(loaded)


def test_help_loads_few_modules() -> None:
    loaded = _modules_after(HELP) - _modules_after("pass")
    assert not HEAVY & loaded
    assert len(loaded) <= 70, sorted(loaded)


def test_numbers_page_is_up_to_date() -> None:
    fresh = numbers_page.page(read_all(numbers_page.RESULTS))
    assert numbers_page.PAGE.read_text(encoding="utf-8") == fresh, "run `make bench`"
