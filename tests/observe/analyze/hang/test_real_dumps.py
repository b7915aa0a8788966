"""The fault-injected jobs of NVIDIA's resiliency extension: the injected ranks are named."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from tests.counted import instructions

SETS = {"gpu_error_1st": {12, 14}, "lock_gil_1st": {9, 14}}
pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", SETS)
def test_the_injected_ranks_are_named_and_no_others(shared: Path, name: str) -> None:
    verdict = diagnose_hang(read_flight_recorder([shared / "traces/nvrx-flight-recorder" / name]))
    assert {each.rank for each in verdict.culprits} == SETS[name]
    assert {each.confidence for each in verdict.culprits} == {"certain"}
    assert verdict.suspects == ()


@pytest.mark.parametrize(
    ("name", "deleted"), [(name, rank) for name, ranks in SETS.items() for rank in sorted(ranks)]
)
def test_also_without_the_dump_of_one(shared: Path, name: str, deleted: int) -> None:
    dumps = read_flight_recorder([shared / "traces/nvrx-flight-recorder" / name])
    left = tuple(dump for dump in dumps.dumps if dump.rank != deleted)
    assert {each.rank for each in diagnose_hang(dumps._replace(dumps=left)).culprits} == SETS[name]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("deleted", range(16))
def test_whichever_dump_is_lost_the_injected_ranks_stand_first(
    shared: Path, name: str, deleted: int
) -> None:
    dumps = read_flight_recorder([shared / "traces/nvrx-flight-recorder" / name])
    left = tuple(dump for dump in dumps.dumps if dump.rank != deleted)
    ranked = [each.rank for each in diagnose_hang(dumps._replace(dumps=left)).culprits]
    assert set(ranked[:2]) == SETS[name]


def test_sixteen_ranks_take_few_instructions_and_no_torch(shared: Path) -> None:
    folder = shared / "traces/nvrx-flight-recorder/gpu_error_1st"
    size = sum(path.stat().st_size for path in folder.iterdir())
    diagnose_hang(read_flight_recorder([folder]))
    assert instructions(lambda: diagnose_hang(read_flight_recorder([folder]))) < 100 * size
    code = (
        "import sys; from meshwright.cli.entry_point import main\n"
        f"try: main(['hang', {str(folder)!r}, '-q'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["12", "14"]
