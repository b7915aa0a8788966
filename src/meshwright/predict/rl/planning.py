"""`plan_rl`: which placement, which engines and how many GPUs for which side make steps shortest.

For every placement and every size of an engine, splits of the GPUs are searched by thirds: the step
is taken to have one valley between too few engines and too few trainers. The trainer's layout is
what `training` finds fastest on its share.
"""

from collections.abc import Callable
from math import lcm

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.rl.engines import require_room
from meshwright.predict.rl.outcome import Outcome, predict_rl
from meshwright.predict.rl.setup import Rounds, Setup, share_of
from meshwright.predict.rl.training import training_layout
from meshwright.predict.serving.engine import VLLM, Engine
from meshwright.predict.serving.fleet import Copies, default_limits
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.replica import Replica
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

SPLITS = 16
"""Parts that GPUs are split into, about as many, where there are more."""
MEASURED = 2
"""Steps that each simulation of a search measures."""
Report = Callable[[str], None]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be learned, and on how many GPUs."""

    model: Model
    cluster: Cluster
    """As large as the run: all its GPUs are used."""
    rounds: Rounds
    placements: tuple[Placement, ...] = PLACEMENTS
    max_staleness: int = 1
    """Of `asynchronous`."""
    degrees: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Values of `tp` of an engine that are tried."""
    formats: Formats = Formats()
    engine: Engine = VLLM
    fixed: dict[str, tuple[object, ...]] = {}
    """Fields of the trainer's layout that are given."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A setup and what it comes to."""

    setup: Setup
    outcome: Outcome


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The best of each placement and engine, the shortest step first."""

    plans: tuple[Planned, ...]
    refused: dict[str, str]
    """What cannot be done, with the reason."""
    simulations: int


def plan_rl(question: Question, *, report: Report | None = None) -> Answer:
    """Return the shortest steps there are.

    Raises:
        InputError: where nothing fits, with the first reason.
    """
    search = _Search(question, report or (lambda _: None))
    for placement in question.placements:
        for degree in question.degrees:
            search.look(placement, degree)
    if not search.plans:
        degrees = ", ".join(map(str, question.degrees))
        what = f"engines of {degrees} do not divide them"
        first = search.reason or Problem("--tp", what, "leave --tp out")
        what = f"nothing fits on {question.cluster.gpus} GPUs: {first.what}"
        raise InputError([first._replace(what=what)])
    ranked = sorted(search.plans, key=lambda one: one.outcome.step_s)
    return Answer(plans=tuple(ranked), refused=search.refused, simulations=search.simulations)


class _Search:
    """The state of a search."""

    def __init__(self, question: Question, report: Report) -> None:
        self.question, self.report = question, report
        self.plans: list[Planned] = []
        self.refused: dict[str, str] = {}
        self.reason: Problem | None = None
        """Why the first of them cannot do; where larger engines may help, why the last cannot."""
        self.simulations = 0
        self._layouts: dict[int, Layout | InputError] = {}

    def look(self, placement: Placement, degree: int) -> None:
        """Find the best split of one kind."""
        gpus = self.question.cluster.gpus
        if degree > gpus or gpus % degree:
            return
        if placement == "colocated":
            best = self._tried(placement, degree, gpus, gpus)
        else:
            best = self._valley(placement, degree, gpus)
        if best is not None:
            self.plans.append(best)

    def _valley(self, placement: Placement, degree: int, gpus: int) -> Planned | None:
        """Return the best of all splits, where the step has one valley over them."""
        # Both sides have whole nodes, where there are several, and engines are whole.
        node = self.question.cluster.gpus_per_node
        part = lcm(degree, node if gpus > node else 1)
        part *= max(1, gpus // (SPLITS * part))
        splits = list(range(part, gpus, part))
        seen: dict[int, Planned | None] = {}

        def at(place: int) -> float:
            if place not in seen:
                rollout = splits[place]
                seen[place] = self._tried(placement, degree, rollout, gpus - rollout)
            found = seen[place]
            return float("inf") if found is None else found.outcome.step_s

        low, high = 0, len(splits) - 1
        while high - low > 2:
            left, right = low + (high - low) // 3, high - (high - low) // 3
            # Of two that do not fit, neither tells on which side of them others do.
            if at(left) == at(right) == float("inf"):
                break
            if at(left) <= at(right):
                high = right - 1
            else:
                low = left + 1
        for place in range(low, high + 1):
            at(place)
        found = [one for one in seen.values() if one is not None]
        return min(found, key=lambda one: one.outcome.step_s, default=None)

    def _tried(
        self, placement: Placement, degree: int, rollout: int, training: int
    ) -> Planned | None:
        asked = self.question
        name = f"{placement}, engines of {degree}, {rollout} + {training} GPUs"
        self.report(f"{self.simulations} simulated, {name}")
        try:
            replica = Replica(
                model=asked.model, cluster=asked.cluster, formats=asked.formats,
                layout=Layout(tp=degree), engine=asked.engine,
            )  # fmt: skip
            engines = Copies(
                replica=replica, limits=default_limits(replica), count=rollout // degree
            )
            require_room(engines, asked.rounds)
            setup = Setup(
                model=asked.model, cluster=asked.cluster, placement=placement, engines=engines,
                training=self._layout(training), rounds=asked.rounds, measured=MEASURED,
                max_staleness=asked.max_staleness if placement == "asynchronous" else None,
            )  # fmt: skip
            self.simulations += 1
            return Planned(setup=setup, outcome=predict_rl(setup, even=False))
        except InputError as error:
            problem = error.problems[0]
            self.refused[name] = problem.what
            if self.reason is None or self.reason.where == "engines":
                self.reason = problem
            return None

    def _layout(self, gpus: int) -> Layout:
        if gpus not in self._layouts:
            asked = self.question
            try:
                self._layouts[gpus] = training_layout(
                    asked.model, share_of(asked.cluster, gpus), asked.rounds, asked.fixed
                )
            except InputError as error:
                self._layouts[gpus] = error
        found = self._layouts[gpus]
        if isinstance(found, InputError):
            raise found
        return found
