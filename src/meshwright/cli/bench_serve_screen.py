"""How `mw bench serve` looks: one load in full, several side by side, two results compared."""

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.compare import (
    FEW,
    Compared,
    Difference,
    compare,
    pairs_of,
)
from meshwright.observe.bench.serving.echo import Echo
from meshwright.observe.bench.serving.figures import Figures, figures_of
from meshwright.observe.bench.serving.result import Result, Run
from meshwright.predict.serving.latency import LATENCIES, Objective
from meshwright.spec.units import format_count, format_seconds, format_some

INTERRUPTED = 130
_SHOWN = 5
_NOTHING = "–"


def answer_of(
    result: Result, objective: Objective | None, echo: Echo | None, *, guessed: bool = False
) -> Answer:
    """Return the screen of a result; exit code 1 where a request failed or an answer differs."""
    found = [figures_of(run, objective) for run in result.runs]
    views: list[View] = [facts(_head(result))]
    if len(found) == 1:
        views += _one(result.runs[0], found[0])
    else:
        views.append(_many(result.runs, found))
    if echo is not None:
        views.append(facts(_echo(echo), "answers"))
        views += [Note(line) for line in (*echo.differing, *echo.unanswered)[:_SHOWN]]
    views += [Note(line) for line in _remarks(result, found, guessed=guessed)]
    data: dict[str, Any] = {
        "server": msgspec.to_builtins(result.server),
        "command": result.command,
        "date": result.date,
        "seed": result.seed,
        "machine": msgspec.to_builtins(result.machine),
        "software": result.software,
        "slo": dict(objective) if objective else None,
        "runs": [_data(run, one) for run, one in zip(result.runs, found, strict=True)],
        "interrupted": result.interrupted,
        "echo": None if echo is None else echo._asdict(),
    }
    wrong = any(one.faults for one in found)
    wrong = wrong or (echo is not None and bool(echo.differing or echo.unanswered))
    code = INTERRUPTED if result.interrupted else 1 if wrong else 0
    quiet = tuple(f"{one.output_tokens_per_s:.1f}" for one in found)
    return Answer("bench.serve/1", data, tuple(views), quiet, code)


def _data(run: Run, one: Figures) -> dict[str, Any]:
    return {
        "name": run.name,
        "rate_per_s": run.rate_per_s,
        "in_flight": run.in_flight,
        **msgspec.to_builtins(one),
        "generator": {
            **msgspec.to_builtins(run.generator),
            "bottleneck": run.generator.bottleneck or None,
        },
        "gave_up": run.gave_up,
    }


def _head(result: Result) -> dict[str, object]:
    server = result.server
    return {
        "server": server.url + (f" ({server.software})" if server.software else ""),
        "model": server.model,
        "from": f"{result.machine.host}, {result.machine.cores} cores",
        "seed": result.seed,
    }


def _one(run: Run, one: Figures) -> list[View]:
    rows = [
        (
            words,
            *(
                format_seconds(value)
                for value in (s.mean_s, s.p50_s, s.p90_s, s.p95_s, s.p99_s, s.most_s)
            ),
        )
        for name, words in LATENCIES.items()
        if (s := one.latency.get(name)) is not None
    ]
    columns = "latency, mean, p50, p90, p95, p99, most"
    return [
        facts(_throughput(run, one), "load"),
        table(columns, rows, right="mean, p50, p90, p95, p99, most"),
    ]


def _throughput(run: Run, one: Figures) -> dict[str, object]:
    good = None
    if one.good_per_s is not None:
        good = format_some(one.good_per_s, "request/s", "requests/s")
        good += f", {one.good_share or 0:.1%} of all"
    return {
        "load": run.name,
        "requests": f"{one.sent:,} in {format_seconds(one.seconds)}",
        "failed": _faults(one),
        "most in flight": run.generator.most_in_flight,
        "requests answered": f"{one.requests_per_s:.3g}/s",
        "prompt tokens": f"{format_count(one.prompt_tokens_per_s)}/s",
        "output tokens": f"{format_count(one.output_tokens_per_s)}/s",
        "while more were sent": None
        if one.loaded_tokens_per_s is None
        else f"{format_count(one.loaded_tokens_per_s)} output tokens/s",
        "all tokens": f"{format_count(one.total_tokens_per_s)}/s",
        "from the server's cache": f"{one.cached_share:.1%} of prompts"
        if one.cached_share
        else None,
        "goodput": good,
        "generator": _generator(run),
    }


def _generator(run: Run) -> str:
    seen = run.generator
    return (
        f"sent {format_seconds(seen.late_p99_s)} late (p99), woke {format_seconds(seen.lag_p99_s)} "
        f"late (p99), {seen.cpu_share:.0%} of a core"
    )


def _faults(one: Figures) -> str | None:
    if not one.faults:
        return None
    return ", ".join(f"{count:,} {cause}" for cause, count in one.faults.items())


def _many(runs: Sequence[Run], found: Sequence[Figures]) -> View:
    rows = []
    for run, one in zip(runs, found, strict=True):
        cells = [run.name, f"{one.sent:,}", sum(one.faults.values()) or ""]
        cells += [f"{one.requests_per_s:.3g}/s", f"{format_count(one.output_tokens_per_s)}/s"]
        for name in ("ttft", "itl", "e2e"):
            spread = one.latency.get(name)
            for share in ("p50_s", "p99_s"):
                cells.append(_NOTHING if spread is None else format_seconds(getattr(spread, share)))
        if one.good_share is not None:
            cells.append(f"{one.good_share:.0%}")
        rows.append(cells)
    numbers = (
        "requests, failed, answered, output tokens, ttft p50, ttft p99, itl p50, itl p99, e2e p50, "
        "e2e p99"
    )
    if any(one.good_share is not None for one in found):
        numbers += ", good"
    return table(f"load, {numbers}", rows, right=numbers)


def _echo(echo: Echo) -> dict[str, object]:
    return {
        "the same": f"{echo.same:,}",
        "unlike": f"{len(echo.differing):,}",
        "unanswered": f"{len(echo.unanswered):,}" if echo.unanswered else None,
    }


def _remarks(result: Result, found: Sequence[Figures], *, guessed: bool) -> list[str]:
    said = []
    for run, one in zip(result.runs, found, strict=True):
        if slow := run.generator.bottleneck:
            said.append(
                f"{run.name}: the load generator was the bottleneck: it {slow}; times are its own "
                "as much as the server's"
            )
        if run.gave_up:
            said.append(f"{run.name}: nothing more was sent, as no request succeeded")
        if one.off_output and result.asking.exact:
            said.append(
                f"{run.name}: {format_some(one.off_output, 'answer has', 'answers have')} another "
                "length than was asked for: this server does not know ignore_eos or min_tokens"
            )
        if one.off_prompt:
            said.append(
                f"{run.name}: the server counts {format_some(one.off_prompt, 'prompt')} with "
                "another length"
            )
        first = next((r for r in run.requests if r.counted and r.fault and r.detail), None)
        if first is not None:
            said.append(f"{run.name}: request {first.index}: {first.fault}: {first.detail}")
    if result.interrupted:
        said.append("interrupted: what was not sent yet is left out")
    if guessed:
        said.append("the server has no /tokenize, so that a word was taken for a token")
    return said


def compared_answer(paths: Sequence[str], first: Result, second: Result) -> Answer:
    """Return two results side by side."""
    pairs = pairs_of(first, second)
    if not pairs:
        names = [", ".join(run.name for run in result.runs) for result in (first, second)]
        what = f"no load is the same: {names[0]} there, {names[1]} here"
        raise InputError([Problem(paths[1], what, "compare results of the same loads")])
    found = [compare(a, b) for a, b in pairs]
    views: list[View] = [
        facts({"first": _title(paths[0], first), "second": _title(paths[1], second)})
    ]
    views += [_compared(one) for one in found]
    views += [Note(line) for line in _unlike(first, second)]
    beyond = [line for one in found for line in one.lines if line.beyond_noise]
    note = f"{sum(line.better for line in beyond)} figures are better in the second beyond noise, "
    views.append(Note(note + f"{sum(not line.better for line in beyond)} are worse"))
    data = {
        "first": paths[0],
        "second": paths[1],
        "runs": [
            {
                "name": one.name,
                "lines": [
                    {**msgspec.to_builtins(line), "beyond_noise": line.beyond_noise}
                    for line in one.lines
                ],
            }
            for one in found
        ],
    }
    return Answer("bench.serve.compare/1", data, tuple(views), tuple(line.name for line in beyond))


def _title(path: str, result: Result) -> str:
    server = result.server
    return f"{path}: {server.model} on {server.software or server.url}, {result.date}"


def _compared(one: Compared) -> View:
    rows = [
        (
            line.name,
            _amount(line, line.first),
            _amount(line, line.second),
            f"{line.change:+.1%}",
            _interval(line),
            _verdict(line),
        )
        for line in one.lines
    ]
    columns = "figure, first, second, change, 99 of 100 resamplings, verdict"
    return table(columns, rows, one.name, right="first, second, change, 99 of 100 resamplings")


def _amount(line: Difference, value: float) -> str:
    return format_seconds(value) if line.unit == "s" else f"{format_count(value)} {line.unit}"


def _interval(line: Difference) -> str:
    if line.low is None or line.high is None:
        return ""
    return f"{line.low:+.1%} … {line.high:+.1%}"


def _verdict(line: Difference) -> str:
    if line.low is None:
        return "one value each"
    if not line.beyond_noise:
        return "within noise"
    return "better" if line.better else "worse"


def _unlike(first: Result, second: Result) -> list[str]:
    """Say what keeps two results from being comparable."""
    said = []
    if first.server.model != second.server.model:
        said.append(f"the models differ: {first.server.model} and {second.server.model}")
    if first.seed != second.seed:
        said.append(f"the seeds differ: {first.seed} and {second.seed}: other prompts and lengths")
    if first.asking.temperature != second.asking.temperature:
        said.append("the temperatures differ")
    if any(len(run.requests) < FEW for result in (first, second) for run in result.runs):
        said.append(f"with fewer than {FEW} requests, what is beyond noise is called so too easily")
    if first.machine != second.machine:
        said.append("the load came from different machines")
    for name, a, b in (("first", first, second), ("second", second, first)):
        if any(run.generator.bottleneck for run in a.runs):
            said.append(f"the load generator was the bottleneck of the {name} result")
        left = {run.name for run in a.runs} - {run.name for run in b.runs}
        if left and len(a.runs) > 1:
            said.append(f"only the {name} result has {', '.join(sorted(left))}")
    return said
