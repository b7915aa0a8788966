"""Searches for files that crash, hang or exhaust a reader, guided by the branches they reach.

    pip install atheris          # a tool for developers; no dependency of the project
    python -m scripts.fuzz_coverage gguf --seconds 600
    python -m scripts.fuzz_coverage --all --seconds 600 --out fuzz-out

`scripts.fuzz_readers` spoils files blindly and runs whole commands over them; this runs one reader
per format and keeps each input that reaches something new. A fault is any exception but the
project's own errors, more than 5 s of CPU time, more memory than 10 times the file and 200 MB, or
the end of the process. Faults lie in `OUT/NAME/faults`, each with its traceback. `--replay FILE`
reads one file as a target does. Inputs to begin with are made by the target, and taken from
`tests/scripts/fuzz_corpus/NAME`; `--keep` adds the smallest new ones there.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from scripts.fuzzing.mutations import PIECES
from scripts.fuzzing.targets import TARGETS

CORPUS = Path(__file__).parents[1] / "tests" / "scripts" / "fuzz_corpus"
_KEPT_FILES, _KEPT_BYTES = 12, 2_000
"""Most files of a target in the repository, and their largest size."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": "off", "RUST_BACKTRACE": "0"}
_LEAST_S = 5
"""With less time left a process that ended is not started again."""
_COVERED = re.compile(rb"cov: (\d+) ft: (\d+)")


class RunReport(NamedTuple):
    """What one run of one target came to."""

    target: str
    seconds: float
    executions: int
    branches: int
    features: int
    corpus_files: int
    faults: tuple[Path, ...]


def fuzz(name: str, seconds: int, out: Path) -> RunReport:
    """Run one target for so long; a process that native code ended is started again."""
    folder = out / name
    for part in ("corpus", "seeds", "faults"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for path in sorted((CORPUS / name).glob("*")):
        shutil.copy(path, folder / "seeds")
    words = folder / "words.dict"
    words.write_text("".join(_dictionary_line(piece) for piece in PIECES))
    began, executions, branches, features = time.monotonic(), 0, 0, 0
    while (left := seconds - (time.monotonic() - began)) > _LEAST_S:
        said = _run_process(name, folder, int(left), words)
        progress = folder / "progress.json"
        executions += json.loads(progress.read_text())["executions"] if progress.exists() else 0
        progress.unlink(missing_ok=True)
        for found in _COVERED.finditer(said):
            branches, features = max(branches, int(found[1])), max(features, int(found[2]))
        if b"ImportError" in said or b"ModuleNotFoundError" in said:
            sys.stderr.write(said.decode(errors="replace")[-2000:])
            break
    faults = tuple(sorted(p for p in (folder / "faults").iterdir() if p.suffix != ".txt"))
    for scratch in folder.glob(f"fuzz-{name}-*"):
        shutil.rmtree(scratch, ignore_errors=True)
    return RunReport(
        name, time.monotonic() - began, executions, branches, features,
        sum(1 for _ in (folder / "corpus").iterdir()), faults,
    )  # fmt: skip


def _dictionary_line(piece: bytes) -> str:
    """Quote bytes as libFuzzer's dictionaries do."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in piece) + '"\n'


def _run_process(name: str, folder: Path, seconds: int, words: Path) -> bytes:
    command = [
        sys.executable, "-m", "scripts.fuzzing.coverage_run", name, str(folder.resolve()),
        f"-max_total_time={seconds}", f"-dict={words.resolve()}",
    ]  # fmt: skip
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[1],
            env=os.environ | _ENVIRONMENT,
        )  # fmt: skip
        try:
            process.wait(timeout=seconds + 120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return log.read_bytes()


def replay(name: str, path: Path) -> int:
    """Read one file as the target does; an error that it may raise is printed."""
    from importlib import import_module

    from meshwright.errors import MeshwrightError

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:  # readers write beside the file
        try:
            import_module(TARGETS[name].module).READERS[name](Path(shutil.copy(path, folder)))
        except MeshwrightError as error:
            print(f"{type(error).__name__}: {error}")
    return 0


def keep_smallest(name: str, out: Path) -> int:
    """Copy the smallest new inputs into the repository; return how many there are now."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted((out / name / "corpus").iterdir(), key=lambda path: path.stat().st_size)
    small = [path for path in found if 0 < path.stat().st_size <= _KEPT_BYTES]
    step = max(1, len(small) // _KEPT_FILES)
    for path in small[::-step][:_KEPT_FILES]:
        shutil.copy(path, folder / path.name[:16])
    return sum(1 for _ in folder.iterdir())


def _print(report: RunReport) -> None:
    print(
        f"{report.target:18}{report.seconds:7.0f} s{report.executions:12,} executions"
        f"{report.branches:8,} branches{report.features:8,} features"
        f"{report.corpus_files:6,} inputs{len(report.faults):4} faults",
        flush=True,
    )
    for path in report.faults:
        print(f"    {path}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; exit code 1 where there is a fault."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--all", action="store_true", help="every target, one after the other")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: 600)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="faults and inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="read this file, and end")
    parser.add_argument("--keep", action="store_true", help="add small inputs to the repository")
    args = parser.parse_args(arguments)
    names = list(TARGETS) if args.all else args.targets
    unknown = sorted(set(names) - set(TARGETS))
    if unknown or not names:
        parser.error(f"name targets of {', '.join(TARGETS)}, or --all")
    if args.replay is not None:
        return replay(names[0], args.replay)
    if find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install atheris")
    reports = []
    for name in names:
        reports.append(fuzz(name, args.seconds, args.out))
        _print(reports[-1])
        if args.keep:
            keep_smallest(name, args.out)
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
