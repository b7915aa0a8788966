"""Finds the dumps that ranks wrote, one file each, and reads the rank from their names."""

import re
from collections.abc import Iterable
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.timeline.paths import refusals

_ENDING = re.compile(r"(?:\.(?:pkl|pickle|json|gz|bin|dump|trace|pt|txt))+$", re.IGNORECASE)
_NAMED_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})$")


def dump_files(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the dumps among files and folders, and a note for each file that was left out."""
    files: list[Path] = []
    notes: list[str] = []
    for path in map(Path, paths):
        with refusals(path, "read"):
            if not path.exists():
                fix = "name the dumps' files, or their folder"
                raise InputError([Problem(str(path), "there is no such file or folder", fix)])
            if not path.is_dir():
                files.append(path)
                continue
            inside = [inner for inner in sorted(path.iterdir()) if inner.is_file()]
        for inner in inside:
            if _looks_like_a_dump(inner):
                files.append(inner)
            else:
                notes.append(f"{inner.name} is no dump and was left out")
    return files, notes


def _looks_like_a_dump(path: Path) -> bool:
    """Tell a dump in a folder by its name's rank and first byte; an empty file is a failed dump."""
    if rank_in_name(path) is None or path.suffix in (".log", ".txt", ".md"):
        return False
    with refusals(path, "read"), path.open("rb") as file:
        head = file.read(2)
    return not head or head[:1] in (b"\x80", b"{", b"[", b"(", b"}", b"]") or head == b"\x1f\x8b"


def rank_in_name(path: Path) -> int | None:
    """Return the rank that a file's name tells: the one it names, else its last number."""
    stem = _ENDING.sub("", path.name)
    named = _NAMED_RANK.findall(stem)
    if named:
        return int(named[-1])
    last = _LAST_NUMBER.search(stem)
    return int(last[1]) if last else None
