"""Refuses what no reader may do: start programs, load code, write files, reach the network."""

import os
import sys
from pathlib import Path
from typing import Any

_REFUSED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    "subprocess.Popen", "pickle.find_class", "socket.connect", "socket.bind", "ctypes.dlopen",
    "shutil.", "os.rename",
    "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.mkdir", "os.putenv",
    "sqlite3.enable_load_extension", "sqlite3.load_extension", "urllib.Request", "os.kill",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Escaped(BaseException):
    """A reader tried what it may not."""


class Guard:
    """An audit hook, which cannot be removed but rests while it is not armed."""

    def __init__(self, allowed: Path) -> None:
        self.armed = False
        self.seen = ""
        """The first refused act since it was armed, also where somebody swallowed the exception."""
        self._allowed = str(allowed)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event.startswith(_REFUSED) or self._writes(event, given) or _runs_text(event, given):
            if event.startswith(("os.remove", "os.rmdir", "os.mkdir", "shutil.")) and str(
                given[0]
            ).startswith(self._allowed):
                return  # readers unpack compressed databases into a folder of their own
            self.seen = self.seen or f"{event}{given!r:.200}"
            raise Escaped(self.seen)

    def _writes(self, event: str, given: tuple[Any, ...]) -> bool:
        if event != "open" or str(given[0]).startswith(self._allowed):
            return False
        return isinstance(given[2], int) and bool(given[2] & _WRITING)


def _runs_text(event: str, given: tuple[Any, ...]) -> bool:
    """Tell whether a text is compiled that is no module: what eval and exec do.

    Named tuples do so too, where a module of them is imported late.
    """
    if event != "compile" or given[0] is None or str(given[1]) != "<string>":
        return False
    return not bytes(given[0]).startswith(b"lambda _cls, ") if isinstance(given[0], bytes) else True
