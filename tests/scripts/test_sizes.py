"""The sizes script: packages and the lines of a change."""

import subprocess
from pathlib import Path

import pytest

from scripts.sizes import change, count_per_package, find_package, lines_of


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("src/meshwright/errors.py", "(top)"),
        ("src/meshwright/spec/model/count.py", "spec"),
        ("tests/spec/test_model.py", "tests"),
    ],
)
def test_a_file_belongs_to_a_package(path: str, expected: str) -> None:
    assert find_package(path) == expected


def test_lines_are_counted_per_package(tmp_path: Path) -> None:
    spec = tmp_path / "src" / "meshwright" / "spec"
    spec.mkdir(parents=True)
    (spec / "a.py").write_text("one\ntwo\n")
    (spec / "b.py").write_text("one\n")
    assert count_per_package(lines_of(tmp_path).items()) == {"spec": (2, 3)}


def test_a_change_counts_edited_and_new_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["user.name=x", "user.email=x@example.com", "commit.gpgsign=false"]
        identity = [part for setting in settings for part in ("-c", setting)]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    spec = tmp_path / "src" / "meshwright" / "spec"
    spec.mkdir(parents=True)
    (spec / "a.py").write_text("one\ntwo\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (spec / "a.py").write_text("one\nthree\nfour\n")
    (spec / "b.py").write_text("new\n")
    assert change(tmp_path, "HEAD") == {"spec": (3, 1)}


def test_outside_a_repository_there_is_no_change(tmp_path: Path) -> None:
    assert change(tmp_path, "HEAD") is None
