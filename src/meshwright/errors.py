"""What can go wrong, and which exit code it becomes on the command line.

    MeshwrightError
    ├── InputError          what was given is wrong            exit 2
    │   └── DamagedFile     a file broke off; carries what could be read
    └── MissingDependency   this machine lacks something       exit 3

An `InputError` carries every `Problem` that was found, so that a user mends a file once.
Exit code 1 ("the answer is no") is an answer, never an exception.
"""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong: where it is, what is wrong there, and what would mend it."""

    where: str
    """Path of the value, such as `layout.tp` or `models/mine.toml: blocks[0].attention.heads`."""
    what: str
    """The fault, with the value that was given and what is allowed."""
    fix: str = ""
    """The nearest change that would work; empty where none is known."""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} (fix: {self.fix})" if self.fix else head


class MeshwrightError(Exception):
    """The root of every error raised on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(MeshwrightError, ValueError):
    """What the user gave is wrong; every problem found is listed."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        self.problems: tuple[Problem, ...] = (
            (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DamagedFile(InputError):
    """A file is truncated or corrupt; `readable` holds what could still be read."""

    def __init__(self, problems: Iterable[Problem] | str, kept: object = None) -> None:
        super().__init__(problems)
        self.readable = kept


class MissingDependency(MeshwrightError):
    """This machine lacks a package, device or program that the command needs."""

    exit_code: ClassVar[int] = 3

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint
