"""`ProgramSandbox`: processes that run what a model wrote, each confined, all ended after a check.

The process that uses it runs no such program itself, and none of these processes has the channel
over which verdicts leave. A verifier takes one as its second argument when it is marked:

    @uses_program_sandbox
    def passes(job, sandbox): ...
"""

import contextlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from meshwright.run.posttrain.rollout.verifiers.sandbox.confinement import Confinement
from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import IS_LINUX
from meshwright.run.posttrain.rollout.verifiers.sandbox.namespaces import (
    SHARED_MEMORY,
    mount_empty_again,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.process_tree import kill_descendants
from meshwright.run.posttrain.rollout.verifiers.sandbox.resource_limits import limit_processor_time
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    LayerRecord,
    SandboxConfig,
)

_END_S = 5.0
_MARK = "uses_program_sandbox"
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/alternatives", "/etc/mime.types", "/usr/share/zoneinfo",
)  # fmt: skip
"""What programs may read of a system, beside Python and its packages."""

Function = TypeVar("Function", bound=Callable[..., object])


def uses_program_sandbox(verifier: Function) -> Function:
    """Mark a verifier that runs programs in the sandbox that it is given."""
    setattr(verifier, _MARK, True)
    return verifier


def wants_program_sandbox(verifier: Callable[..., object]) -> bool:
    """Say whether a verifier is marked."""
    return bool(getattr(verifier, _MARK, False))


def list_python_paths() -> tuple[str, ...]:
    """Return what a program may read: Python, its packages and the system's libraries.

    Other entries of `sys.path` may be folders of a project, with its data and keys.
    """
    installed = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [sys.base_prefix, sys.prefix, *(installed[name] for name in names)]
    paths += [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    return (*_SYSTEM, *dict.fromkeys(str(Path(each).resolve()) for each in paths))


class ProgramSandbox:
    """Starts processes for one check after another."""

    def __init__(self, config: SandboxConfig, entered: Sequence[str], *, deadline_s: float) -> None:
        """Confine programs as `config` says; `entered` are layers that are active around them."""
        self.config = config
        self.deadline_s = deadline_s
        """For one check."""
        self._is_mounted = "bounded disk" in entered
        self._has_own_memory = "own shared memory" in entered
        self._confinement = Confinement(config, entered)
        self._started: list[int] = []

    def start(
        self, run: Callable[[], object], keep: Sequence[int], *, inspectable: bool = True
    ) -> int:
        """Run a function in a confined process that has only the descriptors `keep`."""
        parent = os.getpid()
        child = os.fork()
        if child:
            self._started.append(child)
            return child
        code = 1
        try:
            self.enter(parent, keep, inspectable=inspectable)
            run()
            code = 0
        except BaseException:  # noqa: BLE001  nothing may go back into the code that forked
            code = 1
        finally:
            os._exit(code)

    def enter(self, parent: int, keep: Sequence[int], *, inspectable: bool = True) -> LayerRecord:
        """Confine this process, for good."""
        _close_descriptors({0, 1, 2, *keep, self._confinement.ruleset})
        os.chdir(self.config.folder)
        limit_processor_time(self.deadline_s)
        record = self._confinement.confine(parent=parent, inspectable=inspectable)
        self._confinement.close()
        return record

    def finish(self) -> None:
        """End all processes that are left, and clear away what they wrote."""
        # Linux tells who is left; elsewhere it is who was started here.
        known = () if IS_LINUX else tuple(self._started)
        self._started.clear()
        if not kill_descendants(*known, within_s=_END_S):
            raise OSError("processes of a program do not end")
        if self._has_own_memory and os.listdir(SHARED_MEMORY):  # noqa: PTH208 - names suffice
            mount_empty_again(SHARED_MEMORY)
            self._confinement.refresh()
        if os.listdir(self.config.folder):  # noqa: PTH208
            if self._is_mounted:
                os.chdir("/")
                mount_empty_again(self.config.folder)
            else:
                self._remove_files()
            self._confinement.refresh()

    def _remove_files(self) -> None:
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.config.folder, ignore_errors=True)
        Path(self.config.folder).mkdir(exist_ok=True)


def _close_descriptors(keep: set[int]) -> None:
    last = -1
    for each in (*sorted(number for number in keep if number >= 0), 1024):
        if each > last + 1:  # CPython closes every descriptor for the empty range (0, 0)
            os.closerange(last + 1, each)
        last = each
