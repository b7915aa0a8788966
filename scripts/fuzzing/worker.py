"""One process that runs cases under limits, and writes down which one it is at."""

import io
import json
import pickle
import random
import resource
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from scripts.fuzzing.guard import Guard
from scripts.fuzzing.inputs import (
    EVENTS,
    Input,
    made_by_hand,
    pieces_of_real_files,
    spans_as_parquet,
)
from scripts.fuzzing.mutations import (
    as_json,
    as_pickle,
    compressed,
    opcodes,
    payloads,
    spoiled_bytes,
    spoiled_value,
)
from scripts.fuzzing.reading import READERS
from tests.timeline.readers.small_dumps import dump, entry

MEMORY_LIMIT_BYTES = 6 << 30
GROWTH_LIMIT_BYTES = 400 << 20
TIME_LIMIT_S = 6.0
"""Of CPU, for files of at most some hundred kilobytes."""
WEIGHTS = {
    "kineto": 20, "kineto gz": 5, "chrome": 7, "nsight": 6, "flight recorder": 16,
    "flight recorder JSON": 8, "memory snapshot": 12, "NCCL log": 8, "NCCL inspector": 5,
    "execution trace": 6, "chakra": 5, "parquet": 3, "own trace": 4, "any": 4, "folder": 3,
}  # fmt: skip


class Fault(NamedTuple):
    """A case that went wrong."""

    number: int
    reader: str
    what: str


class Tally(NamedTuple):
    """What the cases of one reader came to."""

    answered: int = 0
    damaged: int = 0
    refused: int = 0
    longest_s: float = 0.0
    grown_bytes: int = 0


class Case(NamedTuple):
    """One spoiled file."""

    reader: str
    data: bytes


class Maker:
    """Makes the cases: the same number gives the same file."""

    def __init__(self, folder: Path, shared: Path | None, seed: int) -> None:
        self.seed = seed
        self.canary = folder / "canary"
        found = list(made_by_hand(folder))
        if shared is not None and shared.is_dir():
            found += pieces_of_real_files(shared, folder)
        self.inputs: dict[str, list[Input]] = {}
        for each in found:
            self.inputs.setdefault(each.reader, []).append(fill_input(each))
        self.inputs["kineto gz"] = self.inputs["kineto"]
        self.inputs["any"] = self.inputs["folder"] = [
            each for those in self.inputs.values() for each in those[:3]
        ]
        self._payloads = payloads(self.canary)
        self._opcodes = opcodes(self.canary)

    def case(self, number: int) -> tuple[Case, random.Random]:
        """Make one case, and the dice that go on with it."""
        rng = random.Random(f"{self.seed}:{number}")
        reader = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        given = rng.choice(self.inputs[reader])
        data = self._spoiled(given, rng)
        if reader == "kineto gz" or rng.random() < 0.01:
            data = compressed(data, rng)
        return Case(reader, data), rng

    def _spoiled(self, given: Input, rng: random.Random) -> bytes:
        if given.form == "pickle" and rng.random() < 0.06:
            return self._attack(given, rng)
        other = rng.choice(self.inputs[given.reader]).data
        if not given.form or rng.random() < 0.3:
            return spoiled_bytes(given.data, rng, other)
        value = given.value
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            value = spoiled_value(value, rng)
        try:
            data = as_json(value, rng) if given.form == "json" else as_pickle(value, rng)
        except (ValueError, TypeError, RecursionError, UnicodeError):
            data = given.data
        return spoiled_bytes(data, rng, other) if rng.random() < 0.4 else data

    def _attack(self, given: Input, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            raw = rng.choice(self._opcodes)
            return spoiled_bytes(raw, rng) if rng.random() < 0.2 else raw
        value = dict(given.value)
        value[rng.choice(list(value))] = rng.choice(self._payloads)
        return as_pickle(value, rng)


def fill_input(given: Input) -> Input:
    """Write the bytes of an input that is made of a value."""
    if given.data:
        return given
    rng = random.Random(0)
    data = as_json(given.value, rng) if given.form == "json" else as_pickle(given.value, rng)
    return given._replace(data=data)


class Overtime(BaseException):
    """A case took too long."""


def _overtime(*_: object) -> None:
    raise Overtime


def run(
    folder: Path, maker: Maker, span: tuple[int, int], at: "Synchronized[int]", to: Connection
) -> None:
    """Run the cases from one number to another; faults go to the parent at once."""
    tempfile.tempdir = str(folder)
    write_sound_files(folder)
    guard = Guard(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGPROF, _overtime)
    tallies: dict[str, Tally] = {}
    for number in range(*span):
        at.value = number
        case, rng = maker.case(number)
        path = folder / "case_rank_0"
        path.write_bytes(case.data)
        before = _peak_bytes()
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        guard.seen, guard.armed = "", True
        try:
            outcome, what = _outcome(case.reader, path, rng)
        finally:
            guard.armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        took, grown = time.process_time() - began, _peak_bytes() - before
        if guard.seen:
            what = f"escaped: {guard.seen}"
        elif maker.canary.exists():
            what = "the canary's file was made: code ran"
            maker.canary.unlink()
        elif grown > GROWTH_LIMIT_BYTES:
            what = what or f"grew by {grown >> 20} MiB for {len(case.data):,} bytes"
        if grown > 64 << 20:
            Path("/proc/self/clear_refs").write_text("5")  # sets the highest mark back
        if what:
            to.send(Fault(number, case.reader, what))
        tallies[case.reader] = _added(tallies.get(case.reader, Tally()), outcome, took, grown)
    at.value = span[1]
    to.send(tallies)
    to.close()


def _outcome(reader: str, path: Path, rng: random.Random) -> tuple[str, str]:
    """Read one file; return how it ended, and what is wrong with that."""
    try:
        READERS[reader](path, rng)
    except DamagedFile:
        return "damaged", ""
    except InputError as error:
        return "refused", "" if error.problems else "an error without a problem"
    except Overtime:
        return "", f"took more than {TIME_LIMIT_S:g} s\n{_last_lines()}"
    except MemoryError:
        return "", f"ran out of memory\n{_last_lines()}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what we look for
        return "", f"{type(error).__name__}: {error}"[:300] + f"\n{_last_lines()}"
    return "answered", ""


def _last_lines() -> str:
    text = io.StringIO()
    traceback.print_exc(limit=-6, file=text)
    return text.getvalue()[-1500:]


def _added(tally: Tally, outcome: str, took: float, grown: int) -> Tally:
    if outcome:
        tally = tally._replace(**{outcome: getattr(tally, outcome) + 1})
    return tally._replace(
        longest_s=max(tally.longest_s, took), grown_bytes=max(tally.grown_bytes, grown)
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_sound_files(folder: Path) -> None:
    """Write the files that spoiled ones are read beside."""
    (folder / "sound_rank_1").write_bytes(pickle.dumps(dump([entry(7)])))
    source = folder / "sound.json"
    source.write_text(json.dumps({"traceEvents": EVENTS}))
    (folder / "sound.parquet").write_bytes(spans_as_parquet(read_kineto(source), folder / "own"))


def warm_up(folder: Path, maker: Maker) -> None:
    """Read sound files first, so that nothing is imported or grown while the guard is armed."""
    always: Any = random.Random(0)
    always.random = lambda: 0.0
    path = folder / "case_rank_0"
    for reader, inputs in maker.inputs.items():
        for given in inputs[:4]:
            path.write_bytes(given.data)
            with suppress(InputError):  # pieces of real files may be cut
                READERS[reader](path, always)
