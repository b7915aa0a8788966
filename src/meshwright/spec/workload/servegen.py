"""Read ServeGen's client models: `chunk-N-trace.csv` beside `chunk-N-dataset.json`.

A row of the trace is a window: start, rate, variation, family of the gaps, its shape and scale (all
empty or zero while the client is silent). The dataset maps the start of a longer span to
histograms, each a Python dictionary written as text. See arXiv 2505.09999 and its repository.
"""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.spec.field_checks import check_choice, check_number
from meshwright.spec.file_formats import read_text
from meshwright.spec.serialization import format_value
from meshwright.spec.workload.client_mix import (
    ArrivalFamily,
    ClientLengths,
    ClientMix,
    ClientRateWindow,
    PromptItem,
    WorkloadClient,
)
from meshwright.spec.workload.lengths import EmpiricalLength

# What a multimodal prompt holds beside its text: so many items, each of so many tokens.
_MODALITIES = ("image", "audio", "video")
_LAST_WINDOW_S = 600.0
_SHOWN_PROBLEMS = 10


def read_clients(path: str | Path) -> ClientMix:
    """Read the client models of a folder, or of one `chunk-N-trace.csv`.

    Clients without lengths (no dataset file, or nothing in it) cannot be drawn from and are left
    out. A damaged file raises `DamagedFile`, which keeps the other clients.
    """
    path = Path(path)
    traces = [path] if path.is_file() else sorted(path.glob("chunk-*-trace.csv"), key=_number)
    if not traces:
        what = "there is no client model (chunk-N-trace.csv)"
        raise InputError([Problem(str(path), what, "give a folder of ServeGen's data")])
    clients: list[WorkloadClient] = []
    problems: list[Problem] = []
    for trace in traces:
        try:
            client = _client(trace)
        except InputError as error:
            problems.extend(error.problems)
        else:
            clients.extend([client] if client else [])
    kept = ClientMix(clients=tuple(clients))
    if problems:
        raise DamagedFile(problems, kept=kept)
    if not clients:
        what = "no client here has any lengths"
        fix = "put each chunk-N-dataset.json beside its chunk-N-trace.csv"
        raise InputError([Problem(str(path), what, fix)])
    return kept


def _number(path: Path) -> tuple[int, str]:
    """Sort chunk-5 before chunk-12."""
    middle = path.name.split("-")[1]
    return (int(middle) if middle.isdecimal() else 0, path.name)


def _client(trace: Path) -> WorkloadClient | None:
    name = trace.name.removesuffix("-trace.csv")
    dataset = trace.with_name(f"{name}-dataset.json")
    if not dataset.is_file():
        return None
    windows = _windows(trace)
    habits = _habits(dataset)
    return WorkloadClient(name=name, windows=windows, lengths_over_time=habits) if habits else None


def _windows(path: Path) -> tuple[ClientRateWindow, ...]:
    windows: list[ClientRateWindow] = []
    problems: list[Problem] = []
    for line, text in enumerate(read_text(path).splitlines(), start=1):
        try:
            windows.append(_window(next(csv.reader([text]))))
        except (ValueError, csv.Error) as error:
            problems += _at(f"{path}:{line}", error, "mend the row, or leave it out")
    for before, after in pairwise(windows):
        if after.start_s <= before.start_s:
            what = f"the window at {after.start_s:g} follows the one at {before.start_s:g}"
            problems.append(Problem(str(path), what, "sort the rows by their start"))
    if not problems and not windows:
        fix = "give rows of start,rate,cv,family,shape,scale"
        problems.append(Problem(str(path), "holds no windows", fix))
    if problems:
        raise InputError(problems[:_SHOWN_PROBLEMS])
    starts = [window.start_s for window in windows]
    lengths = [after - before for before, after in pairwise(starts)]
    lengths.append(lengths[-1] if lengths else _LAST_WINDOW_S)
    return tuple(
        ClientRateWindow(
            start_s=window.start_s,
            length_s=length,
            rate_per_s=window.rate_per_s,
            family=window.family,
            shape=window.shape,
        )
        for window, length in zip(windows, lengths, strict=True)
    )


def _at(place: str, error: Exception, fix: str) -> list[Problem]:
    """Return the problems of an error with the place they were found at."""
    if isinstance(error, InputError):
        return [
            Problem(place, f"{problem.where}: {problem.what}", problem.fix)
            for problem in error.problems
        ]
    return [Problem(place, str(error), fix)]


def _window(cells: list[str]) -> ClientRateWindow:
    """Read one row; how long its window lasts shows only in the next row."""
    if len(cells) != 6:
        what = f"{format_value(','.join(cells))} is not start,rate,cv,family,shape,scale"
        raise ValueError(what)
    start, rate, _, family, shape, _ = cells
    numbers = float(start), float(rate), float(shape or 0)
    problems = [
        *check_number("start", numbers[0], 0, 1e12),
        *check_number("rate", numbers[1], 0, 1e6),
    ]
    if not family:
        numbers = numbers[0], 0.0, 1.0
    elif family not in get_args(ArrivalFamily):
        problems += check_choice("family", family, get_args(ArrivalFamily))
    else:
        problems += check_number("shape", numbers[2], 1e-4, 1e4)
    if problems:
        raise InputError(problems)
    return ClientRateWindow(
        start_s=numbers[0],
        length_s=0.0,
        rate_per_s=numbers[1],
        family="Weibull" if family == "Weibull" else "Gamma",
        shape=numbers[2],
    )


def _habits(path: Path) -> tuple[ClientLengths, ...]:
    try:
        spans = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        what = f"is not valid JSON: {error}"
        raise InputError([Problem(str(path), what, "fetch the file again")]) from None
    if not isinstance(spans, dict):
        what = f"{format_value(spans)} is not an object of time spans"
        fix = 'write it like {"0": {"input_tokens": "{12: 1.0}", "output_tokens": "{8: 1.0}"}}'
        raise InputError([Problem(str(path), what, fix)])
    habits: list[ClientLengths] = []
    problems: list[Problem] = []
    for start, fields in spans.items():
        try:
            habit = _habit(start, fields)
        except (TypeError, ValueError) as error:
            problems += _at(f"{path}: {start}", error, "mend the span, or leave it out")
        else:
            habits.extend([habit] if habit else [])
    if problems:
        raise InputError(problems[:_SHOWN_PROBLEMS])
    return tuple(sorted(habits, key=lambda habit: habit.start_s))


def _habit(start: str, fields: dict[str, str]) -> ClientLengths | None:
    """Read one span; None where the client was silent."""
    if not isinstance(fields, dict):
        raise ValueError(f"{format_value(fields)} is not an object of histograms")
    start_s = float(start)
    prompt = _histogram(fields, "text_tokens" if "text_tokens" in fields else "input_tokens")
    output = _histogram(fields, "output_tokens")
    if prompt is None or output is None:
        return None
    parts = []
    for kind in _MODALITIES:
        if f"{kind}_count" in fields:
            count = _histogram(fields, f"{kind}_count")
            tokens = _histogram(fields, f"{kind}_tokens")
            if count and tokens and count.values != (0,):
                parts.append(PromptItem(count=count, tokens=tokens))
    return ClientLengths(start_s=start_s, prompt=prompt, output=output, prompt_items=tuple(parts))


def _histogram(fields: dict[str, str], name: str) -> EmpiricalLength | None:
    """Read text such as `{12: 0.5, 40: 0.5}`; None where it is empty."""
    if not isinstance(fields.get(name), str):
        raise ValueError(f"has no histogram {name!r}, only {format_value(', '.join(fields))}")
    inside = fields[name].strip().removeprefix("{").removesuffix("}")
    weights: dict[int, float] = {}
    for item in filter(None, inside.split(",")):
        length, _, weight = item.partition(":")
        weights[int(length)] = float(weight)
    if not weights:
        return None
    lengths = sorted(weights)
    return EmpiricalLength(values=tuple(lengths), weights=tuple(weights[key] for key in lengths))
