"""The same search on many cores or machines, through Ray.

The splits of the GPUs are dealt out like cards, the most promising first, and each part is searched
by a task of its own. A board that all of them see holds the fastest layouts found so far, so that
what one finds cuts the search of all others short. Workers need Meshwright installed.
"""

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import MissingDependency
from meshwright.local_ray import start_local_ray
from meshwright.predict.plan.answer.infeasibility import explain_infeasible
from meshwright.predict.plan.answer.plan_answer import PlanAnswer, build_plan
from meshwright.predict.plan.planner import reject_unsearched_fields
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import (
    PlanCandidate,
    PlanProgress,
    PlanSearch,
    Report,
    restrict_to_common_layouts,
)
from meshwright.predict.plan.space.degree_splits import DegreeSplit

if TYPE_CHECKING:
    from types import ModuleType

_SHARE_S = 1.0
"""How often a task shows what it found and sees what others did."""
_LOOK_S = 0.5
"""How often the caller looks at the board."""


class PartResult(NamedTuple):
    """What the search of one part came to."""

    best: list[PlanCandidate]
    layouts_bounded: int
    evaluated: int


class SharedBest(NamedTuple):
    """What a board shows: the fastest layouts, and how far all parts are together."""

    best: list[PlanCandidate]
    progress: PlanProgress


class SharedBestActor:
    """What all parts of a search know together: the fastest of each family, and their bounds."""

    def __init__(
        self, most: int, known: Iterable[PlanCandidate], bounds_s: Sequence[float]
    ) -> None:
        self._most, self._best = most, select_fastest(known, most)
        self._far = [PlanProgress(None, bound_s, 0, 1) for bound_s in bounds_s]

    def report(
        self, part: int, best: list[PlanCandidate], far: PlanProgress
    ) -> list[PlanCandidate]:
        """Take what a part found and how far it is; return the fastest of all."""
        self._best = select_fastest([*self._best, *best], self._most)
        self._far[part] = far
        return self._best

    def get_state(self) -> SharedBest:
        """Return what is known, and how far all parts are together."""
        best_s = self._best[0].step.step_s if self._best else None
        bound_s = min([far.bound_s for far in self._far], default=float("inf"))
        if best_s is not None:
            bound_s = min(bound_s, best_s)
        opened, waiting = (sum(column) for column in list(zip(*self._far, strict=True))[2:])
        return SharedBest(self._best, PlanProgress(best_s, bound_s, opened, waiting))


def select_fastest(candidates: Iterable[PlanCandidate], most: int) -> list[PlanCandidate]:
    """Return the fastest of each family, the fastest first, and no more than asked for."""
    found: dict[object, PlanCandidate] = {}
    for one in candidates:
        known = found.get(one.layout_family)
        if known is None or one.step.step_s < known.step.step_s:
            found[one.layout_family] = one
    return sorted(found.values(), key=lambda one: one.step.step_s)[:most]


def find_plans_with_ray(
    question: PlanQuestion,
    *,
    most: int = 5,
    address: str | None = None,
    parts: int | None = None,
    report: Report | None = None,
    execute: bool = True,
) -> PlanAnswer:
    """Find the fastest layouts of a question as `find_plans` does, on a Ray cluster.

    Args:
        question: What is asked.
        most: How many families of layouts to return.
        address: The cluster; None is the one of `RAY_ADDRESS`, one that runs on this machine, or
            a new one on its cores, which ends with the search.
        parts: Tasks to deal the search out to; None is one for each core of the cluster.
        report: Called now and then with how far all parts are; Ctrl-C returns the best so far.
        execute: Whether the finalists are executed event by event.

    Raises:
        MissingDependency: where Ray is not installed.
        InputError: where no layout fits, saying what is missing and what would help.
    """
    ray = _ray()
    reject_unsearched_fields(question)
    start, proved = time.monotonic(), False
    quick = PlanSearch(restrict_to_common_layouts(question), max_plans=most)
    best, far, found = quick.best, PlanProgress(None, 0.0, 0, 0), list[PartResult]()
    try:
        quick.run(report=report)
        best = quick.best
        with _Cluster(ray, address) as cluster:
            hands = split_work(question, parts or cluster.cores)
            spread = _Spread(ray, question, most, best, hands)
            try:
                found = spread.run(report)
                proved = True
            finally:
                state = spread.end()
                best, far = state.best, state.progress
    except KeyboardInterrupt:
        best = best or quick.best
    best = select_fastest([*best, *(one for part in found for one in part.best)], most)
    if not best:
        raise explain_infeasible(question)
    return PlanAnswer(
        question=question,
        plans=tuple(build_plan(question, one, execute) for one in best),
        is_proved=proved,
        bound_s=best[0].step.step_s if proved else far.bound_s,
        expanded_nodes=quick.expanded_nodes + far.expanded_nodes,
        layouts_bounded=quick.layout_nodes.evaluated + sum(part.layouts_bounded for part in found),
        evaluated=quick.evaluated + sum(part.evaluated for part in found),
        search_s=time.monotonic() - start,
    )


class SearchPart(NamedTuple):
    """The splits of the GPUs that one task searches."""

    splits: tuple[DegreeSplit, ...]
    bound_s: float
    """No layout of them takes less."""


def split_work(question: PlanQuestion, parts: int) -> list[SearchPart]:
    """Deal the splits of a question out, so that every part gets some that promise much."""
    search = PlanSearch(question)
    bounds = {
        core: search.bounds.kernels_bound_s(core) for core in search.degree_splits.list_splits()
    }
    cores = sorted(bounds, key=bounds.__getitem__)
    hands = (tuple(cores[part::parts]) for part in range(min(parts, len(cores))))
    return [SearchPart(hand, bounds[hand[0]]) for hand in hands]


class _Sharing(PlanSearch):
    """A search that shows what it finds to others and learns what they found."""

    def __init__(
        self,
        question: PlanQuestion,
        max_plans: int,
        known: list[PlanCandidate],
        part: int,
        board: Any,
    ) -> None:
        super().__init__(question, max_plans=max_plans, known=known)
        self._part, self._board, self._shared_s = part, board, time.monotonic()

    def share(self, far: PlanProgress) -> None:
        """Show and learn, if the last time is long enough ago."""
        if time.monotonic() < self._shared_s + _SHARE_S:
            return
        for one in _ray().get(self._board.report.remote(self._part, self.best, far)):
            self._keep(one)
        self._shared_s = time.monotonic()


def _search_part(
    question: PlanQuestion,
    hand: SearchPart,
    *,
    most: int,
    known: list[PlanCandidate],
    part: int,
    board: Any,
) -> PartResult:
    """Search one hand to its end."""
    search = _Sharing(question, most, known, part, board)
    search.run(hand.splits, report=search.share)
    done = PlanProgress(None, float("inf"), search.expanded_nodes, 0)
    _ray().get(board.report.remote(part, search.best, done))
    return PartResult(search.best, search.layout_nodes.evaluated, search.evaluated)


class _Spread:
    """A search that runs in tasks of a Ray cluster."""

    def __init__(
        self,
        ray: "ModuleType",
        question: PlanQuestion,
        most: int,
        known: list[PlanCandidate],
        hands: list[SearchPart],
    ) -> None:
        self._ray = ray
        bounds_s = [hand.bound_s for hand in hands]
        self._board = ray.remote(num_cpus=0)(SharedBestActor).remote(most, known, bounds_s)
        search = ray.remote(num_cpus=1)(_search_part)
        shared = ray.put(question)
        self._tasks = [
            search.remote(shared, hand, most=most, known=known, part=part, board=self._board)
            for part, hand in enumerate(hands)
        ]

    def run(self, report: Report | None) -> list[PartResult]:
        """Wait for all parts, and say now and then how far they are."""
        left = self._tasks
        while left:
            done, left = self._ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
            self._ray.get(done)  # a part that failed ends the search with its own error
            if left and report is not None:
                report(self._ray.get(self._board.get_state.remote()).progress)
        found: list[PartResult] = self._ray.get(self._tasks)
        return found

    def end(self) -> SharedBest:
        """Stop what still runs; return the fastest found, and how far all parts were."""
        state: SharedBest = self._ray.get(self._board.get_state.remote())
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._ray.kill(self._board)
        return state


class _Cluster:
    """A connection to Ray that ends only what it began."""

    def __init__(self, ray: "ModuleType", address: str | None) -> None:
        self._ray, self._address = ray, address
        self._begun = False

    def __enter__(self) -> "_Cluster":
        self._begun = not self._ray.is_initialized()
        if self._begun:
            self._join()
        return self

    def _join(self) -> None:
        """Join the cluster that is named or runs here; else start one on this machine."""
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        named = self._address or os.environ.get("RAY_ADDRESS")
        try:
            if named != "local":
                self._ray.init(address=named or "auto", **quiet)
                return
        except ConnectionError:
            if named:
                raise
        start_local_ray(self._ray, **quiet)

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._ray.shutdown()

    @property
    def cores(self) -> int:
        """Cores of all its machines."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))


def _ray() -> "ModuleType":
    try:
        import ray
    except ModuleNotFoundError:
        what = "a search on many machines needs Ray, which is not installed"
        raise MissingDependency(what, "pip install 'meshwright[ray]'") from None
    module: ModuleType = ray
    return module
