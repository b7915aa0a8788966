"""A log of what went wrong while watching: the job itself must not notice."""

import os
import time
import traceback

MAX_BYTES = 1 << 20


class ErrorLog:
    """A file of bounded size that takes faults; where it cannot be written, they are dropped."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, what: str) -> None:
        """Write down the exception that is being handled."""
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.fstat(handle).st_size < MAX_BYTES:
                    said = f"{time.time():.3f} pid {os.getpid()}: {what}\n{traceback.format_exc()}"
                    os.write(handle, said.encode("utf-8", "replace"))
            finally:
                os.close(handle)
        except OSError:
            return
