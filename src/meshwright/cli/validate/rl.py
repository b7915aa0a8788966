"""`mw validate rl`: published steps of reinforcement learning beside ours."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table

if TYPE_CHECKING:
    from meshwright.predict.validation.rl_score import ScoredRLRun

EXAMPLES = ("mw validate rl", "mw validate rl --runs runs.json --json")


def run_validation(runs: Path) -> CommandResult:
    """Answer with every row, and how far off those are that can be compared."""
    from meshwright.predict.validation.rl_score import (
        LENGTH_SIGMA,
        LOGPROB_PASSES,
        PROMPT_TOKENS,
        read_rl_runs,
        score_rl_run,
    )

    rows = [score_rl_run(row) for row in read_rl_runs(runs)]
    compared = [one for one in rows if one.error is not None]
    synced = [one for one in rows if one.sync_error is not None]
    others = [one for one in rows if one.error is None and one.sync_error is None]
    errors = [one.error for one in compared if one.error is not None]
    summary = {
        "rows": len(rows),
        "compared": len(compared) + len(synced),
        "median_error": median(errors) if errors else None,
        "median_absolute_error": median(abs(one) for one in errors) if errors else None,
        "worst_error": max(errors, key=abs) if errors else None,
    }
    data = {"rows": [_data(one) for one in rows], "summary": summary}
    views: list[View] = [make_fields(_headline(summary))]
    if compared:
        views.append(
            make_table(
                "run, theirs, ours, difference, trains, equal lengths",
                (_cells(one) for one in compared),
                "seconds of a step",
                right="theirs, ours, difference, trains, equal lengths",
                wide="run",
            )
        )
        views.append(
            make_table(
                "run, draws, log-probabilities, updates, host, sync",
                (_parts(one) for one in compared),
                "seconds of a step of ours in which the trainer waits for answers, or works",
                right="draws, log-probabilities, updates, host, sync",
                wide="run",
            )
        )
    gains = [(one, found) for one in compared if (found := _gain(one, compared)) is not None]
    if gains:
        shown = ((one.row.name, f"{theirs:.2f}", f"{ours:.2f}") for one, (theirs, ours) in gains)
        title = "tokens/s of a GPU, over the synchronous run"
        views.append(
            make_table("run, theirs, ours", shown, title, right="theirs, ours", wide="run")
        )
    if synced:
        views.append(_syncs(synced))
    if others:
        listed = ((one.row.name, _theirs(one), one.skipped) for one in others)
        views.append(make_table("run, theirs, why", listed, "not compared", wide="run, why"))
    spread = f"answers lognormal with sigma {LENGTH_SIGMA:g}"
    views += [
        NoteView(f"assumed for all: prompts of {PROMPT_TOKENS} tokens, {spread}"),
        NoteView(
            f"and {LOGPROB_PASSES} passes without gradients; what software adds is not in ours"
        ),
    ]
    middle = "" if not errors else f"{summary['median_absolute_error']:.4g}"
    return CommandResult("validate.rl/2", data, tuple(views), (middle,))


def _gain(one: "ScoredRLRun", rows: "list[ScoredRLRun]") -> tuple[float, float] | None:
    """Return how many times the tokens of another run theirs and ours make."""
    base = next((other for other in rows if other.row.name == one.row.against), None)
    theirs = one.row.tokens_per_s_per_gpu
    if base is None or base.metrics is None or one.metrics is None or theirs is None:
        return None
    if not base.row.tokens_per_s_per_gpu:
        return None
    ours = one.metrics.tokens_per_s_per_gpu / base.metrics.tokens_per_s_per_gpu
    return theirs / base.row.tokens_per_s_per_gpu, ours


def _headline(summary: dict[str, Any]) -> dict[str, str]:
    said = {"rows": f"{summary['rows']}, of which {summary['compared']} can be compared"}
    if summary["worst_error"] is not None:
        said["step"] = (
            f"median difference {summary['median_error']:+.0%}, worst {summary['worst_error']:+.0%}"
        )
    return said


def _cells(one: "ScoredRLRun") -> tuple[str, ...]:
    assert one.metrics is not None, "compared rows have one"
    outcome = one.metrics
    even = outcome.equal_length_step_s
    return (
        one.row.name,
        f"{one.row.step_s:g}",
        f"{outcome.step_s:.1f}",
        f"{one.error:+.0%}",
        f"{outcome.training_s:.1f}",
        "" if even is None else f"{even:.1f}",
    )


def _parts(one: "ScoredRLRun") -> tuple[str, ...]:
    assert one.metrics is not None, "compared rows have one"
    outcome = one.metrics
    seconds = (
        sum(outcome.waits_s["trainer"].values()),
        outcome.forward_s,
        outcome.training_s - outcome.forward_s - outcome.swap_s,
        outcome.swap_s + outcome.memory_phases_s,
        outcome.sync_s,
    )
    return one.row.name, *(f"{each:.1f}" for each in seconds)


def _syncs(synced: "list[ScoredRLRun]") -> TableView:
    rows = []
    for one in synced:
        assert one.sync is not None, "synced rows have one"
        theirs, ours = f"{one.row.sync_s:g}", f"{one.sync.seconds:.2f}"
        rows.append((one.row.name, theirs, ours, f"{one.sync_error:+.0%}"))
    return make_table(
        "run, theirs, ours, difference",
        rows,
        "seconds of a sync of weights, shard to shard",
        right="theirs, ours, difference",
        wide="run",
    )


def _theirs(one: "ScoredRLRun") -> str:
    row = one.row
    if row.step_s is not None:
        return f"{row.step_s:g} s"
    return "" if row.sync_s is None else f"{row.sync_s:g} s of sync"


def _data(one: "ScoredRLRun") -> dict[str, Any]:
    return {
        "row": msgspec.to_builtins(one.row),
        "outcome": None if one.metrics is None else msgspec.to_builtins(one.metrics),
        "error": one.error,
        "sync": None if one.sync is None else msgspec.to_builtins(one.sync),
        "sync_error": one.sync_error,
        "why": one.skipped,
    }
