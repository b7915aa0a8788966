"""One bounded run of atheris over one target, in a process of its own.

libFuzzer chooses inputs by the branches they reach. A fault is written down and the run goes on, so
that one finding does not hide the next; the process ends early only where native code crashes,
hangs, or asks for more memory than the limit.
"""

import hashlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.errors import MeshwrightError
from scripts.fuzzing.structured import Mutator
from scripts.fuzzing.targets import TARGETS, Reader

ADDRESS_SPACE_BYTES = 12 << 30
"""Most of it is reserved by torch and Arrow, and never touched."""
GROWTH_LIMIT_BYTES = 200 << 20
GROWTH_PER_BYTE = 10
TIME_LIMIT_S = 5.0
"""Of CPU time, as other processes may hold the processor."""
WALL_LIMIT_S = 60
"""Where native code holds on for so long, libFuzzer ends the process."""


class Overtime(BaseException):
    """An input took too long."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Overtime


class FaultLog:
    """Writes the first input of each fault to a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.seen: set[str] = set()

    def add(self, data: bytes, what: str, error: BaseException | None = None) -> None:
        """Keep an input unless one with the same fault in the same lines is known."""
        frames = traceback.extract_tb(error.__traceback__)[-3:] if error else []
        mark = "|".join(
            [what.partition(":")[0], *(f"{each.filename}:{each.lineno}" for each in frames)]
        )
        if mark in self.seen:
            return
        self.seen.add(mark)
        label = hashlib.sha256(data).hexdigest()[:12]
        path = self.folder / f"{self.name}-{label}"
        path.write_bytes(data)
        text = "".join(traceback.format_exception(error)) if error else ""
        path.with_suffix(".txt").write_text(f"{what}\n{text[-4000:]}")
        print(f"FAULT {self.name}: {what[:300]} ({path})", flush=True)


def check_input(read: Reader, path: Path, data: bytes, log: FaultLog) -> None:
    """Read one input under the limits; write down what goes wrong."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    before = _peak_bytes()
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
    try:
        read(path)
    except MeshwrightError:
        pass
    except Overtime as error:
        log.add(data, f"took more than {TIME_LIMIT_S:g} s", error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what we look for
        log.add(data, f"{type(error).__name__}: {error}", error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak_bytes() - before
    if grown > GROWTH_LIMIT_BYTES + GROWTH_PER_BYTE * len(data):
        log.add(data, f"grew by {grown >> 20} MiB")
    if grown > GROWTH_LIMIT_BYTES // 4:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mutator(atheris: Any, mutate: Mutator) -> Any:
    def custom(data: bytes, most_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            made = mutate(data, rng)
            if made is not None and len(made) <= most_bytes:
                return made
        return bytes(atheris.Mutate(data, most_bytes))

    return custom


def run(name: str, folder: Path, flags: list[str]) -> None:
    """Fuzz one target; `folder` has `corpus/`, `seeds/` and `faults/`. Never returns."""
    atheris: Any = import_module("atheris")
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.packages)):
        module = import_module(target.module)
    read: Reader = module.READERS[name]
    scratch = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir=folder))
    tempfile.tempdir = str(scratch)
    for number, data in enumerate(module.SEEDS[name](scratch)):
        (folder / "seeds" / f"{number:03d}").write_bytes(data)
    path, log = scratch / "case_rank_0", FaultLog(folder / "faults", name)
    started, counted = time.monotonic(), [0]

    def test_one_input(data: bytes) -> None:
        counted[0] += 1
        check_input(read, path, data, log)
        if counted[0] % 256 == 0:
            said = {"executions": counted[0], "seconds": round(time.monotonic() - started)}
            (folder / "progress.json").write_text(json.dumps(said))

    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    arguments = [
        sys.argv[0], str(folder / "corpus"), str(folder / "seeds"), *flags,
        f"-max_len={target.largest_bytes}", f"-timeout={WALL_LIMIT_S}", "-rss_limit_mb=0",
        f"-artifact_prefix={folder / 'faults' / name}-native-", "-print_final_stats=1",
    ]  # fmt: skip
    more: dict[str, Any] = {}
    if target.mutate is not None:
        more["custom_mutator"] = _mutator(atheris, target.mutate)
    atheris.Setup(arguments, test_one_input, **more)
    atheris.Fuzz()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
