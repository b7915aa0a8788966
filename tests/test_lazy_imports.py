"""Names that load on first use."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.lazy_imports import make_lazy_getattr


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with one lazy value and one lazy module."""
    folder = tmp_path / "drowsy"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from meshwright.lazy_imports import make_lazy_getattr\n"
        "__getattr__, __dir__ = make_lazy_getattr(\n"
        "    __name__, {'answer': 'drowsy.deep', 'deep': 'drowsy.deep', 'gone': 'drowsy.deep'}\n"
        ")\n"
    )
    (folder / "deep.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("drowsy")
    for name in ("drowsy", "drowsy.deep"):
        sys.modules.pop(name, None)


def test_importing_the_package_loads_none_of_its_homes(package: ModuleType) -> None:
    assert "drowsy.deep" not in sys.modules
    assert package.answer == 42
    assert "drowsy.deep" in sys.modules


def test_a_name_is_looked_up_once(package: ModuleType) -> None:
    assert "answer" not in vars(package)
    assert package.answer == 42
    assert vars(package)["answer"] == 42


def test_a_name_may_be_a_module(package: ModuleType) -> None:
    assert package.deep is sys.modules["drowsy.deep"]


def test_names_are_listed_in_order_before_they_are_loaded(package: ModuleType) -> None:
    assert dir(package) == ["answer", "deep", "gone"]
    assert "drowsy.deep" not in sys.modules


def test_an_unknown_name_is_an_attribute_error() -> None:
    load, _ = make_lazy_getattr("drowsy", {})
    with pytest.raises(AttributeError, match="module 'drowsy' has no attribute 'anser'"):
        load("anser")


def test_a_name_that_its_home_lacks_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="gone"):
        _ = package.gone
