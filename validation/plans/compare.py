"""One question: the plan that is found, and where the published layouts stand beside it."""

import time
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import LayoutSpace, PlanAnswer, PlanQuestion, find_plans
from meshwright.predict.plan.search.branch_and_bound import PlanProgress
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.validation.plans.layout_sample import RankEstimate, sample_layouts
from meshwright.spec.layout import Layout
from validation.plans.questions import Group, Published

_SWITCHES = (
    "order",
    "cp_kind",
    "overlap_gradients",
    "overlap_parameters",
    "overlap_tp",
    "overlap_pp",
    "overlap_ep",
    "offload",
    "offload_layers",
)
"""What hardly anybody tunes. A layout that sets them well has beaten most of the space by that
alone, so ranks are also taken among layouts that set them the same."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How much work goes into one question."""

    search_s: float = 30.0
    """Seconds after which a search is stopped if its best so far beats what was published."""
    longest_s: float = 240.0
    """Seconds after which it is stopped in any case."""
    draws: int = 200
    """Feasible layouts drawn for each rank."""
    tries: int = 4000
    """Draws made at the most, those that do not fit included."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A published layout beside the plan for the same question."""

    id: str
    source: str
    model: str
    gpu: str
    gpus: int
    global_batch: int
    sequence_length: int
    precision: str
    full: bool
    """Whether the source gives the whole layout."""
    measured_step_s: float
    published_step_s: float
    """Its prediction."""
    fits: bool
    """Whether it is predicted to fit."""
    rank: RankEstimate | None
    """The share of the whole space's feasible layouts that is predicted faster."""
    rank_alike: RankEstimate | None
    """The same among layouts with its own order of axes, overlap and offload."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question."""

    key: str
    plan_step_s: float | None
    """None where no plan was found; `trouble` says why."""
    proved: bool
    bound_s: float | None
    """No layout of the space takes less."""
    search_s: float
    layout: dict[str, Any]
    """The plan, as far as it is not the default."""
    tried: int
    """Layouts drawn from the whole space, those that do not fit included."""
    drawn: int
    """Those that fit."""
    faster: int
    """Those that beat the plan: 0 where a plan is proved rightly."""
    sample_s: float
    rows: tuple[Row, ...]
    trouble: str = ""


def compare(group: Group, settings: Settings) -> Compared:
    """Find a plan, draw layouts, and rank the published ones."""
    question, seed = group.question, int(group.key, 16)
    predicted = [_predicted(question, row.layout) for row in group.rows]
    wanted_s = min([step_s for step_s, fits in predicted if fits], default=float("inf"))
    began = time.monotonic()
    answer, trouble = _answer(question, settings, wanted_s)
    search_s = time.monotonic() - began
    drawn = sample_layouts(question, feasible=settings.draws, tries=settings.tries, seed=seed)
    alike = {_switches(row.layout): row for row in group.rows}
    samples = {
        switches: sample_layouts(
            _narrowed(question, row.layout),
            feasible=settings.draws, tries=settings.tries, seed=seed,
        )
        for switches, row in alike.items()
    }  # fmt: skip
    rows = []
    for row, (step_s, fits) in zip(group.rows, predicted, strict=True):
        ranked = drawn.estimate_rank(step_s) if fits else None
        near = samples[_switches(row.layout)].estimate_rank(step_s) if fits else None
        rows.append(_row(row, step_s, fits, ranked, near))
    best = answer.best.step.step_s if answer is not None else None
    return Compared(
        key=group.key,
        plan_step_s=best,
        proved=answer is not None and answer.is_proved,
        bound_s=answer.bound_s if answer is not None else None,
        search_s=search_s,
        layout=_said(answer.best.layout) if answer is not None else {},
        tried=drawn.tried,
        drawn=len(drawn.fastest),
        faster=drawn.count_faster(best) if best is not None else 0,
        sample_s=time.monotonic() - began - search_s,
        rows=tuple(rows),
        trouble=trouble,
    )


def _predicted(question: PlanQuestion, layout: Layout) -> tuple[float, bool]:
    """Return how long a layout's step takes, and whether it fits."""
    run = question.build_run(layout)
    return predict_step(run).step_s, predict_memory(run).fits


def _answer(
    question: PlanQuestion, settings: Settings, wanted_s: float
) -> tuple[PlanAnswer | None, str]:
    """Search until it is proved, or for so long; whatever is best by then is the answer.

    What was published decides how long a search may take and nothing else.
    """
    began = time.monotonic()

    def passed_s() -> float:
        return time.monotonic() - began

    def stop(progress: PlanProgress) -> None:
        enough = progress.best_step_s is not None and progress.best_step_s <= wanted_s
        if passed_s() > (settings.search_s if enough else settings.longest_s):
            raise KeyboardInterrupt  # as a user would: the best so far is kept

    try:
        answer = find_plans(question, most=1, report=stop, execute=False)
    except KeyboardInterrupt:
        # A search that is stopped before it has any answer cannot say that there is none.
        return None, f"no answer in {passed_s():.0f} s"
    except InputError as error:
        return None, str(error.problems[0])
    return answer, "" if answer.is_proved else f"stopped after {passed_s():.0f} s"


def _switches(layout: Layout) -> tuple[Any, ...]:
    return tuple(getattr(layout, name) for name in _SWITCHES)


def _narrowed(question: PlanQuestion, layout: Layout) -> PlanQuestion:
    """Return a question whose layouts have some layout's switches."""
    fixed = {name: (getattr(layout, name),) for name in _SWITCHES}
    if layout.cp == 1:
        fixed["cp_kind"] = question.space.get_allowed("cp_kind") or ()  # it has none
    space: LayoutSpace = msgspec.structs.replace(question.space, fixed=fixed)
    return msgspec.structs.replace(question, space=space)


def _said(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout that differ from the defaults."""
    usual, found = msgspec.to_builtins(Layout()), msgspec.to_builtins(layout)
    return {name: value for name, value in found.items() if value != usual[name]}


def _row(
    row: Published,
    step_s: float,
    fits: bool,
    rank: RankEstimate | None,
    rank_alike: RankEstimate | None,
) -> Row:
    question = row.question
    return Row(
        id=row.id,
        source=row.source,
        model=question.model.name,
        gpu=row.gpu,
        gpus=question.gpus,
        global_batch=question.workload.global_batch,
        sequence_length=question.workload.sequence_length,
        precision=row.layout.precision,
        full=row.full,
        measured_step_s=row.measured_step_s,
        published_step_s=step_s,
        fits=fits,
        rank=rank,
        rank_alike=rank_alike,
    )
