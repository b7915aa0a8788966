"""Renew the tables of the docs page on plans from the newest result.

    python -m validation.plans.page

What stands between `<!-- published -->` and `<!-- end -->` on the page depends on the newest file
of `results/` only, and a test compares the two.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.machine import Machine
from meshwright.predict.validation.plans.layout_sample import RankEstimate
from validation.plans.compare import Compared, Row
from validation.plans.run import RESULTS, Result, read_result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "plans.md"

WELL_TUNED = frozenset(
    {
        "Megatron-Bridge perf summary",
        "Megatron-Core MoE",
        "Megatron-LM README H100",
        "Megatron-MoE-ModelZoo",
        "NVIDIA dgxc-benchmarking",
        "NeMo AutoModel",
        "NeMo docs",
    }
)
"""NVIDIA's tables of recipes it recommends. Its papers' sweeps, its ablations and its tests of
correctness are not among them: nobody tuned those for speed."""

TOP = 0.05
_RETUNED = 1.2
"""How many times longer a layout takes than another of its source before that is said."""
_SLACK = 1e-9
"""Rounding between two ways to the same number."""
_NAMED = 12
"""Rows named one by one at the most."""


class Stood(NamedTuple):
    """A published layout with the answer to its question."""

    row: Row
    answer: Compared

    @property
    def gain(self) -> float | None:
        """By how much the published layout takes longer than the plan."""
        plan = self.answer.plan_step_s
        return None if plan is None else self.row.published_step_s / plan - 1

    @property
    def beaten(self) -> bool:
        """Whether the plan is at least as fast."""
        return self.gain is not None and self.gain >= -_SLACK


def stood(result: Result, *, full: bool) -> list[Stood]:
    """Return the published layouts that sources give whole, or those that they do not."""
    every = (Stood(row, answer) for answer in result.compared for row in answer.rows)
    return [one for one in every if one.row.full is full]


def table(some: Iterable[Stood]) -> str:
    """Write how plans do by source, the well-tuned ones first, and together."""
    by_source: dict[str, list[Stood]] = {}
    for one in some:
        by_source.setdefault(one.row.source, []).append(one)
    tuned = sorted(name for name in by_source if name in WELL_TUNED)
    others = sorted(name for name in by_source if name not in WELL_TUNED)
    lines = [
        "| source | layouts | plan at least as fast | median gain | median rank | in the top 5 % "
        "| median rank, same switches | in the top 5 %, same switches |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line(name, by_source[name]) for name in tuned]
    if tuned:
        lines.append(_line("**NVIDIA's tables**", _together(by_source, tuned)))
    lines += [_line(name, by_source[name]) for name in others]
    lines.append(_line("**all**", _together(by_source, by_source)))
    return "\n".join(lines)


def _together(by_source: dict[str, list[Stood]], names: Iterable[str]) -> list[Stood]:
    return [one for name in names for one in by_source[name]]


def _line(name: str, some: Sequence[Stood]) -> str:
    fit = [one for one in some if one.row.fits]
    gains = [one.gain for one in fit if one.gain is not None]
    cells = [
        name,
        str(len(fit)),
        _share(sum(one.beaten for one in fit), len(fit)),
        f"{median(gains):.1%}" if gains else "–",
        *_ranks(fit, lambda one: one.row.rank),
        *_ranks(fit, lambda one: one.row.rank_alike),
    ]
    return f"| {' | '.join(cells)} |"


def _ranks(some: Sequence[Stood], rank_of: Callable[[Stood], RankEstimate | None]) -> list[str]:
    found = [rank for one in some if (rank := rank_of(one)) is not None and rank.draws]
    if not found:
        return ["–", "–"]
    middle = median(rank.share for rank in found)
    return [f"{middle:.1%}", _share(sum(rank.share <= TOP for rank in found), len(found))]


def _share(hits: int, of: int) -> str:
    return f"{hits / of:.1%}" if of else "–"


def section(result: Result) -> str:
    """Write the tables of one result, and what they leave out."""
    whole, assumed = stood(result, full=True), stood(result, full=False)
    parts = [table(whole), *_notes(result, whole)]
    if assumed:
        parts += ["Layouts that their sources give in part, the rest assumed:", table(assumed)]
    return "\n\n".join([*parts, _measured(result)])


def _notes(result: Result, whole: list[Stood]) -> list[str]:
    fit = [one for one in whole if one.row.fits]
    stopped = [one for one in result.compared if not one.proved and one.plan_step_s is not None]
    proved = sum(one.proved for one in result.compared)
    faster = sum(one.faster for one in result.compared if one.proved)
    drawn = sum(one.drawn for one in result.compared)
    notes = [
        f"{proved} of {len(result.compared)} searches ended with a proof. {len(stopped)} were "
        f"stopped and their best so far was taken: after {result.settings.search_s:g} s where that "
        f"beats what was published, after {result.settings.longest_s:g} s in any case. Of "
        f"{drawn:,} layouts drawn, {faster} beat a proved plan.",
        _named("The plan is slower than what was published", [o for o in fit if not o.beaten]),
        _named("Predicted not to fit, and left out", [one for one in whole if not one.row.fits]),
        _named("Of NVIDIA's tables outside the top 5 %", [one for one in fit if _missed(one)]),
    ]
    notes += [_retuned(one) for one in fit if _missed(one)]
    if result.missing:
        notes.append(f"{result.missing} questions were not asked yet.")
    return [note for note in notes if note]


def _missed(one: Stood) -> bool:
    rank = one.row.rank
    return one.row.source in WELL_TUNED and rank is not None and rank.share > TOP


def _retuned(one: Stood) -> str:
    """Say where the source itself measured another layout that is much faster."""
    other = min(one.answer.rows, key=lambda row: row.measured_step_s)
    if one.row.measured_step_s < _RETUNED * other.measured_step_s or other.rank is None:
        return ""
    return (
        f"`{one.row.id}` was measured at {one.row.measured_step_s:.3g} s. For the same question "
        f"`{other.id}` was measured at {other.measured_step_s:.3g} s in another layout, which "
        f"ranks at {other.rank.share:.1%}."
    )


def _named(what: str, some: Sequence[Stood]) -> str:
    if not some:
        return ""
    names = ", ".join(f"`{one.row.id}`{_by(one)}" for one in some[:_NAMED])
    more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
    return f"{what}: {len(some)} ({names}{more})."


def _by(one: Stood) -> str:
    if not one.row.fits:
        return ""
    if one.gain is None:
        return f": {one.answer.trouble}"
    if not one.beaten:
        return f": {-one.gain:.2%}{'' if one.answer.proved else ', stopped'}"
    rank = one.row.rank
    return "" if rank is None else f": {rank.share:.1%}, {rank.low:.1%} to {rank.high:.1%}"


def _measured(result: Result) -> str:
    machine: Machine = result.machine
    seconds = [one.search_s for one in result.compared]
    longest = f"{median(seconds):.1f} s in the median, {max(seconds):.0f} s at the most"
    return (
        f"Compared {result.date} on {machine.cpu}, {machine.cores} cores, {machine.python}, "
        f"{result.jobs} questions at once, one core each; searches took {longest}. Ranks come from "
        f"{result.settings.draws} feasible layouts for each question."
    )


def newest(folder: Path = RESULTS) -> Result | None:
    """Return the newest result of a folder."""
    paths = sorted(folder.glob("*.json"))
    return read_result(paths[-1]) if paths else None


def renewed(page: str, result: Result | None) -> str:
    """Return a page with its tables written anew."""
    found = result is not None and bool(result.compared)
    text = section(result) if result is not None and found else "Nothing has been compared yet."
    pattern = re.compile(r"<!-- published -->\n.*?<!-- end -->", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError("the page has no single place for the published layouts")
    return pattern.sub(lambda _: f"<!-- published -->\n\n{text}\n\n<!-- end -->", page)


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), newest()), encoding="utf-8")
    sys.stdout.write(f"renewed {PAGE.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
