"""How `mw bench serve` looks: one load in full, several side by side, two results compared."""

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.answer_check import AnswerCheck
from meshwright.observe.bench.serving.result_comparison import (
    MIN_REQUESTS,
    MetricDifference,
    RunComparison,
    compare_bench_runs,
    pair_runs,
)
from meshwright.observe.bench.serving.serving_metrics import (
    ServingBenchMetrics,
    compute_serving_metrics,
)
from meshwright.observe.bench.serving.serving_result import ServingBenchResult, ServingBenchRun
from meshwright.predict.serving.sim.latency import LATENCIES, LatencySLO
from meshwright.spec.units import format_count, format_quantity, format_seconds

INTERRUPTED_EXIT_CODE = 130
_SHOWN = 5
_NOTHING = "–"


def make_result(
    result: ServingBenchResult,
    objective: LatencySLO | None,
    echo: AnswerCheck | None,
    *,
    guessed: bool = False,
) -> CommandResult:
    """Return the screen of a result; exit code 1 where a request failed or an answer differs."""
    found = [compute_serving_metrics(run, objective) for run in result.runs]
    views: list[View] = [make_fields(_head(result))]
    if len(found) == 1:
        views += _one(result.runs[0], found[0])
    else:
        views.append(_many(result.runs, found))
    if echo is not None:
        views.append(make_fields(_echo(echo), "answers"))
        views += [NoteView(line) for line in (*echo.different, *echo.unanswered)[:_SHOWN]]
    views += [NoteView(line) for line in _remarks(result, found, guessed=guessed)]
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
        "answer_check": None if echo is None else echo._asdict(),
    }
    wrong = any(one.errors for one in found)
    wrong = wrong or (echo is not None and bool(echo.different or echo.unanswered))
    code = INTERRUPTED_EXIT_CODE if result.interrupted else 1 if wrong else 0
    quiet = tuple(f"{one.output_tokens_per_s:.1f}" for one in found)
    return CommandResult("bench.serve/2", data, tuple(views), quiet, code)


def _data(run: ServingBenchRun, one: ServingBenchMetrics) -> dict[str, Any]:
    return {
        "name": run.name,
        "request_rate": run.request_rate,
        "max_concurrency": run.max_concurrency,
        **msgspec.to_builtins(one),
        "generator": {
            **msgspec.to_builtins(run.generator),
            "bottleneck": run.generator.bottleneck or None,
        },
        "aborted": run.aborted,
    }


def _head(result: ServingBenchResult) -> dict[str, object]:
    server = result.server
    return {
        "server": server.url + (f" ({server.software})" if server.software else ""),
        "model": server.model,
        "from": f"{result.machine.host}, {result.machine.cores} cores",
        "seed": result.seed,
    }


def _one(run: ServingBenchRun, one: ServingBenchMetrics) -> list[View]:
    rows = [
        (
            words,
            *(
                format_seconds(value)
                for value in (s.mean_s, s.p50_s, s.p90_s, s.p95_s, s.p99_s, s.max_s)
            ),
        )
        for name, words in LATENCIES.items()
        if (s := one.latency.get(name)) is not None
    ]
    columns = "latency, mean, p50, p90, p95, p99, most"
    return [
        make_fields(_throughput(run, one), "load"),
        make_table(columns, rows, right="mean, p50, p90, p95, p99, most"),
    ]


def _throughput(run: ServingBenchRun, one: ServingBenchMetrics) -> dict[str, object]:
    good = None
    if one.request_goodput is not None:
        good = format_quantity(one.request_goodput, "request/s", "requests/s")
        good += f", {one.goodput_share or 0:.1%} of all"
    return {
        "load": run.name,
        "requests": f"{one.sent:,} in {format_seconds(one.duration_s)}",
        "failed": _faults(one),
        "most in flight": run.generator.max_concurrency_seen,
        "requests answered": f"{one.requests_per_s:.3g}/s",
        "prompt tokens": f"{format_count(one.prompt_tokens_per_s)}/s",
        "output tokens": f"{format_count(one.output_tokens_per_s)}/s",
        "while more were sent": None
        if one.steady_output_tokens_per_s is None
        else f"{format_count(one.steady_output_tokens_per_s)} output tokens/s",
        "all tokens": f"{format_count(one.total_tokens_per_s)}/s",
        "from the server's cache": f"{one.prefix_cache_hit_rate:.1%} of prompts"
        if one.prefix_cache_hit_rate
        else None,
        "goodput": good,
        "generator": _generator(run),
    }


def _generator(run: ServingBenchRun) -> str:
    seen = run.generator
    return (
        f"send delay p99 {format_seconds(seen.send_delay_p99_s)}, event-loop lag p99 "
        f"{format_seconds(seen.event_loop_lag_p99_s)}, CPU {seen.cpu_share:.0%} of one core"
    )


def _faults(one: ServingBenchMetrics) -> str | None:
    if not one.errors:
        return None
    return ", ".join(f"{count:,} {cause}" for cause, count in one.errors.items())


def _many(runs: Sequence[ServingBenchRun], found: Sequence[ServingBenchMetrics]) -> View:
    rows = []
    for run, one in zip(runs, found, strict=True):
        cells = [run.name, f"{one.sent:,}", sum(one.errors.values()) or ""]
        cells += [f"{one.requests_per_s:.3g}/s", f"{format_count(one.output_tokens_per_s)}/s"]
        for name in ("ttft", "itl", "e2e"):
            spread = one.latency.get(name)
            for share in ("p50_s", "p99_s"):
                cells.append(_NOTHING if spread is None else format_seconds(getattr(spread, share)))
        if one.goodput_share is not None:
            cells.append(f"{one.goodput_share:.0%}")
        rows.append(cells)
    numbers = (
        "requests, failed, answered, output tokens, ttft p50, ttft p99, itl p50, itl p99, e2e p50, "
        "e2e p99"
    )
    if any(one.goodput_share is not None for one in found):
        numbers += ", good"
    return make_table(f"load, {numbers}", rows, right=numbers)


def _echo(echo: AnswerCheck) -> dict[str, object]:
    return {
        "the same": f"{echo.num_same:,}",
        "unlike": f"{len(echo.different):,}",
        "unanswered": f"{len(echo.unanswered):,}" if echo.unanswered else None,
    }


def _remarks(
    result: ServingBenchResult, found: Sequence[ServingBenchMetrics], *, guessed: bool
) -> list[str]:
    said = []
    for run, one in zip(result.runs, found, strict=True):
        if slow := run.generator.bottleneck:
            said.append(
                f"{run.name}: the load generator was the bottleneck ({slow}); times are its own "
                "as much as the server's"
            )
        if run.aborted:
            said.append(f"{run.name}: nothing more was sent, as no request succeeded")
        if one.num_output_length_mismatches and result.request_options.ignore_eos:
            said.append(
                f"{run.name}: "
                f"{format_quantity(one.num_output_length_mismatches, 'answer has', 'answers have')}"
                " another length than was asked for: this server ignores ignore_eos and min_tokens"
            )
        if one.num_prompt_length_mismatches:
            said.append(
                f"{run.name}: the server counts "
                f"{format_quantity(one.num_prompt_length_mismatches, 'prompt')} with "
                "another length"
            )
        first = next((r for r in run.requests if r.in_metrics and r.error and r.error_detail), None)
        if first is not None:
            said.append(f"{run.name}: request {first.index}: {first.error}: {first.error_detail}")
    if result.interrupted:
        said.append("interrupted: what was not sent yet is left out")
    if guessed:
        said.append("the server has no /tokenize, so that a word was taken for a token")
    return said


def make_comparison_result(
    paths: Sequence[str], first: ServingBenchResult, second: ServingBenchResult
) -> CommandResult:
    """Return two results side by side."""
    pairs = pair_runs(first, second)
    if not pairs:
        names = [", ".join(run.name for run in result.runs) for result in (first, second)]
        what = f"no load is the same: {names[0]} there, {names[1]} here"
        raise InputError([Problem(paths[1], what, "compare results of the same loads")])
    found = [compare_bench_runs(a, b) for a, b in pairs]
    views: list[View] = [
        make_fields({"first": _title(paths[0], first), "second": _title(paths[1], second)})
    ]
    views += [_compared(one) for one in found]
    views += [NoteView(line) for line in _unlike(first, second)]
    beyond = [line for one in found for line in one.differences if line.is_significant]
    note = (
        f"{sum(line.is_improvement for line in beyond)} figures are better in the second beyond "
        f"noise, "
    )
    views.append(NoteView(note + f"{sum(not line.is_improvement for line in beyond)} are worse"))
    data = {
        "first": paths[0],
        "second": paths[1],
        "runs": [
            {
                "name": one.name,
                "differences": [
                    {**msgspec.to_builtins(line), "is_significant": line.is_significant}
                    for line in one.differences
                ],
            }
            for one in found
        ],
    }
    return CommandResult(
        "bench.serve.compare/2", data, tuple(views), tuple(line.name for line in beyond)
    )


def _title(path: str, result: ServingBenchResult) -> str:
    server = result.server
    return f"{path}: {server.model} on {server.software or server.url}, {result.date}"


def _compared(one: RunComparison) -> View:
    rows = [
        (
            line.name,
            _amount(line, line.first),
            _amount(line, line.second),
            f"{line.change:+.1%}",
            _interval(line),
            _verdict(line),
        )
        for line in one.differences
    ]
    columns = "figure, first, second, change, 99 of 100 resamplings, verdict"
    return make_table(columns, rows, one.name, right="first, second, change, 99 of 100 resamplings")


def _amount(line: MetricDifference, value: float) -> str:
    return format_seconds(value) if line.unit == "s" else f"{format_count(value)} {line.unit}"


def _interval(line: MetricDifference) -> str:
    if line.low is None or line.high is None:
        return ""
    return f"{line.low:+.1%} … {line.high:+.1%}"


def _verdict(line: MetricDifference) -> str:
    if line.low is None:
        return "one value each"
    if not line.is_significant:
        return "within noise"
    return "better" if line.is_improvement else "worse"


def _unlike(first: ServingBenchResult, second: ServingBenchResult) -> list[str]:
    """Say what keeps two results from being comparable."""
    said = []
    if first.server.model != second.server.model:
        said.append(f"the models differ: {first.server.model} and {second.server.model}")
    if first.seed != second.seed:
        said.append(f"the seeds differ: {first.seed} and {second.seed}: other prompts and lengths")
    if first.request_options.temperature != second.request_options.temperature:
        said.append("the temperatures differ")
    if any(len(run.requests) < MIN_REQUESTS for result in (first, second) for run in result.runs):
        said.append(
            f"with fewer than {MIN_REQUESTS} requests, what is beyond noise is called so too easily"
        )
    if first.machine != second.machine:
        said.append("the load came from different machines")
    for name, a, b in (("first", first, second), ("second", second, first)):
        if any(run.generator.bottleneck for run in a.runs):
            said.append(f"the load generator was the bottleneck of the {name} result")
        left = {run.name for run in a.runs} - {run.name for run in b.runs}
        if left and len(a.runs) > 1:
            said.append(f"only the {name} result has {', '.join(sorted(left))}")
    return said
