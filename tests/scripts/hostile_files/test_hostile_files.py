"""Files made to crash, hang or exhaust a reader end in an answer or one of the project's errors."""

import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

from meshwright.errors import MeshwrightError
from scripts.fuzz_coverage import CORPUS
from scripts.fuzzing.targets import TARGETS, Reader
from tests.scripts.hostile_files.model_cases import gguf_cases, safetensors_cases, tokenizer_cases
from tests.scripts.hostile_files.setting_cases import json_cases, toml_cases, xml_cases, yaml_cases
from tests.scripts.hostile_files.table_cases import archive_cases, parquet_cases, sqlite_cases
from tests.scripts.hostile_files.trace_cases import pickle_cases, trace_cases

_WATCHDOG_S = 60
"""A reader needs well below 5 s; a busy machine may take a while longer."""
_FREE_BYTES, _PER_BYTE = 200 << 20, 10


@cache
def _cases() -> dict[str, dict[str, bytes]]:
    """Make all cases; by target and name."""
    found: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = {
            **trace_cases(), **pickle_cases(), **gguf_cases(folder), **safetensors_cases(),
            **tokenizer_cases(folder), **yaml_cases(), **toml_cases(), **json_cases(),
            **xml_cases(), **sqlite_cases(folder), **parquet_cases(folder), **archive_cases(),
        }  # fmt: skip
    for (target, case), data in made.items():
        found.setdefault(target, {})[case] = data
    for path in sorted(CORPUS.glob("*/*")):
        found.setdefault(path.parent.name, {})[f"found {path.name}"] = path.read_bytes()
    return found


class Hang(BaseException):
    """A reader goes on and on."""


@contextmanager
def _watchdog() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_WATCHDOG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_there_are_some_hundred_cases_of_all_formats() -> None:
    assert sum(map(len, _cases().values())) >= 600
    assert set(_cases()) >= set(TARGETS) - {"fleet_json", "checkpoint"}


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_files_end_in_an_answer_or_an_error(target: str, tmp_path: Path) -> None:
    read: Reader = import_module(TARGETS[target].module).READERS[target]
    path, faults = tmp_path / "case_rank_0", {}
    for name, data in _cases().get(target, {}).items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with _watchdog():
                read(path)
        except MeshwrightError as error:
            if not str(error):
                faults[name] = "an error without a word"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is a fault
            faults[name] = f"{type(error).__name__}: {error}"[:200]
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if grown > _FREE_BYTES + _PER_BYTE * len(data):
            faults[name] = f"{grown >> 20} MiB for {len(data):,} bytes"
    assert not faults
