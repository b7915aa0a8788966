"""`ProgressBar` and `ProgressPrinter`: progress of a run on stderr, for a terminal or a log."""

import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from meshwright.run.train.logging.logger import MetricLogger, StepMetricValues
from meshwright.run.train.logging.logging_config import LoggingConfig
from meshwright.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("reward_mean", lambda value: f"reward {value:.3f}"),
    ("loss", lambda value: f"loss {value:.4f}"),
    ("tokens_per_s", lambda value: f"{format_count(value)} tokens/s"),
    ("mfu", lambda value: f"MFU {value:.1%}"),
    ("max_memory_allocated_bytes", lambda value: f"memory {format_bytes(value)}"),
    ("data_wait_fraction", lambda value: f"data wait {value:.1%}"),
    ("entropy", lambda value: f"entropy {value:.3f}"),
    ("length_mean", lambda value: f"{value:.0f} tokens an answer"),
    ("sampler_tokens_per_s", lambda value: f"{format_count(value)} drawn/s"),
)

_PART = re.compile(r"reward_(\w+)_mean")
"""The mean of one of several rewards; `reward_mean` is that of their weighted sum."""
ClockFn = Callable[[], float]


def open_progress(
    settings: LoggingConfig, steps: int | None, begun_at: int, stream: TextIO | None = None
) -> MetricLogger | None:
    """Return what shows progress on this stream, where anything does."""
    stream = stream or sys.stderr
    kind = settings.progress
    if kind == "auto":
        watched = stream.isatty() and os.environ.get("TERM") != "dumb"
        kind = "bar" if watched else "lines"
    if kind == "none" or os.environ.get("MESHWRIGHT_NO_PROGRESS"):
        return None
    if begun_at and (steps is None or begun_at < steps):
        of_all = "" if steps is None else f" of {steps:,}"
        print(f"resumes after step {begun_at:,}{of_all}", file=stream, flush=True)
    if kind == "lines":
        return ProgressPrinter(steps, begun_at, stream, every_s=settings.log_interval_s)
    from rich.console import Console

    return ProgressBar(steps, begun_at, Console(file=stream))


def format_progress(figures: StepMetricValues) -> str:
    """Return the figures that a person looks at, in words."""
    parts = [(found[1], value) for name, value in figures.items()
             if (found := _PART.fullmatch(name)) is not None]  # fmt: skip
    told = [show(figures[name]) for name, show in _SHOWN if name in figures]
    # Behind the reward, which is the first to be shown.
    told[1:1] = [f"{name} {value:.3f}" for name, value in parts]
    return "  ".join(told)


class ProgressPrinter:
    """Prints a line now and then: the first row, the last, and one after each pause."""

    def __init__(
        self,
        steps: int | None,
        begun_at: int,
        stream: TextIO,
        *,
        every_s: float = 10.0,
        clock: ClockFn = time.monotonic,
    ) -> None:
        self._steps, self._begun_at = steps, begun_at
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._began_s = clock()
        self._said_s: float | None = None
        self._unsaid = ""

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Print the figures, or keep them where a line was printed just before."""
        text = format_progress(figures)
        if not text:
            return
        now_s = self._clock()
        self._unsaid = f"{self._place(step)}  {text}{self._left(step, now_s)}"
        if self._said_s is None or now_s - self._said_s >= self._every_s or step == self._steps:
            self._said_s = now_s
            self._say()

    def close(self) -> None:
        """Print the last row, where it was not printed yet."""
        self._say()

    def _say(self) -> None:
        if self._unsaid:
            print(self._unsaid, file=self._stream, flush=True)
            self._unsaid = ""

    def _place(self, step: int) -> str:
        return f"step {step:,}" + (f" of {self._steps:,}" if self._steps else "")

    def _left(self, step: int, now_s: float) -> str:
        done = step - self._begun_at
        if self._steps is None or done < 1 or step >= self._steps:
            return ""
        left_s = (now_s - self._began_s) / done * (self._steps - step)
        return f"  {format_seconds(left_s)} left" if left_s > 0 else ""


class ProgressBar:
    """Draws a bar in a terminal; colours are left to rich, which honours NO_COLOR."""

    def __init__(self, steps: int | None, begun_at: int, console: "Console") -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, completed=begun_at, figures="")
        self._bar.start()

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Move the bar and show the figures."""
        self._bar.update(self._task, completed=step)
        if text := format_progress(figures):
            self._bar.update(self._task, figures=text)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()
