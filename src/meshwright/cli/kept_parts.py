"""Files that break off: what they hold up to there, and what to say of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from meshwright.errors import DamagedFile

Part = TypeVar("Part")


def read_kept(
    files: Iterable[Path], read: Callable[[Path], Part], kind: type[Part]
) -> tuple[list[Part], list[str]]:
    """Read every file; of one that breaks off, what was kept, and a line on what is wrong."""
    found, damaged = list[Part](), list[str]()
    for file in files:
        try:
            found.append(read(file))
        except DamagedFile as damage:
            if not isinstance(damage.kept, kind):
                raise
            found.append(damage.kept)
            damaged += [f"{one.where}: {one.what}; {one.fix}" for one in damage.problems]
    return found, damaged
