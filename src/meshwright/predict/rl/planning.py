"""`plan_rl`: which placement, which engines and how many GPUs for which side make steps shortest.

For every placement and every size of an engine, splits of the GPUs are searched by thirds: the step
is taken to have one valley between too few engines and too few trainers. The trainer's layout is
what `training` finds fastest on its share. That screening has few steps each; the best are
simulated once more with as many as any other simulation has, which decides.
"""

from collections.abc import Callable
from math import lcm

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.cost import Calibration
from meshwright.predict.rl.engines import require_room
from meshwright.predict.rl.outcome import Outcome, predict_rl
from meshwright.predict.rl.setup import MEASURED, Rounds, Setup, share_of
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
SCREENED = 4
"""Steps that a simulation measures, or a round of them, which only says what to look at again."""
_CLOSE = 1.15
"""What was so many times as slow as the best in few steps may yet be better in many."""
_SPLITS = 2
"""Splits of a kind that are looked at again, where it is close to the best of all."""
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
    calibration: Calibration | None = None
    """What was measured on the GPUs, for both sides."""
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


def plan_rl(question: Question, *, most: int = 8, report: Report | None = None) -> Answer:
    """Return the shortest steps there are, of `most` kinds and of the best synchronous one.

    Raises:
        InputError: where nothing fits, with the first reason.
    """
    search = _Search(question, report or (lambda _: None))
    for placement in question.placements:
        for degree in question.degrees:
            search.look(placement, degree)
    if not search.kinds:
        degrees = ", ".join(map(str, question.degrees))
        what = f"engines of {degrees} do not divide them"
        first = search.reason or Problem("degrees", what, "leave `degrees` out")
        what = f"nothing fits on {question.cluster.gpus} GPUs: {first.what}"
        raise InputError([first._replace(what=what)])
    plans = tuple(search.decide(most))
    return Answer(plans=plans, refused=search.refused, simulations=search.simulations)


def _step_s(plan: Planned) -> float:
    return plan.outcome.step_s


class _Search:
    """The state of a search."""

    def __init__(self, question: Question, report: Report) -> None:
        self.question, self.report = question, report
        self.kinds: list[list[Planned]] = []
        """Splits of each placement and engine that can do, the shortest step first."""
        self.refused: dict[str, str] = {}
        self.reason: Problem | None = None
        """Why the first of them cannot do; where larger engines may help, why the last cannot."""
        self.simulations = 0
        self._layouts: dict[int, Layout | InputError] = {}

    def look(self, placement: Placement, degree: int) -> None:
        """Screen the splits of one kind."""
        gpus = self.question.cluster.gpus
        if degree > gpus or gpus % degree:
            return
        if placement == "colocated":
            found = [self._tried(placement, degree, gpus, gpus)]
        else:
            found = self._valley(placement, degree, gpus)
        some = sorted((one for one in found if one is not None), key=_step_s)
        if some:
            self.kinds.append(some)

    def decide(self, most: int) -> list[Planned]:
        """Simulate the best kinds at length, and return them as that ranks them."""
        ranked = sorted(self.kinds, key=lambda kind: _step_s(kind[0]))
        exact = [kind for kind in ranked if not kind[0].setup.arrangement.max_staleness]
        ranked = [*ranked[:most], *(kind for kind in exact[:1] if kind not in ranked[:most])]
        limit = _CLOSE * _step_s(ranked[0][0])
        plans = [self._decided(kind, _step_s(kind[0]) <= limit) for kind in ranked]
        return sorted(plans, key=_step_s)

    def _decided(self, kind: list[Planned], is_close: bool) -> Planned:
        """Return the best split of a kind; of one that is far from the best of all, the first."""
        limit = _CLOSE * _step_s(kind[0])
        close = [one for one in kind[:_SPLITS] if _step_s(one) <= limit]
        found = []
        for one in close if is_close else close[:1]:
            self.report(f"{self.simulations} simulated, {one.setup.placement} at length")
            setup = msgspec.structs.replace(one.setup, measured=MEASURED)
            found.append(Planned(setup=setup, outcome=predict_rl(setup, even=False)))
            self.simulations += 1
        return min(found, key=_step_s)

    def _valley(self, placement: Placement, degree: int, gpus: int) -> list[Planned | None]:
        """Return splits down to the best of all, where the step has one valley over them."""
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
        return list(seen.values())

    def _tried(
        self, placement: Placement, degree: int, rollout: int, training: int
    ) -> Planned | None:
        asked = self.question
        stale = asked.max_staleness if placement == "asynchronous" else None
        name = f"{placement}, engines of {degree}, {rollout} + {training} GPUs"
        self.report(f"{self.simulations} simulated, {name}")
        try:
            replica = Replica(
                model=asked.model, cluster=asked.cluster, formats=asked.formats,
                layout=Layout(tp=degree), engine=asked.engine, calibration=asked.calibration,
            )  # fmt: skip
            engines = Copies(
                replica=replica, limits=default_limits(replica), count=rollout // degree
            )
            require_room(engines, asked.rounds)
            setup = Setup(
                model=asked.model, cluster=asked.cluster, placement=placement, engines=engines,
                training=self._layout(training), rounds=asked.rounds,
                max_staleness=stale, measured=max(SCREENED, 1 + (stale or 0)),
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
                    asked.model, share_of(asked.cluster, gpus), asked.rounds, asked.fixed,
                    calibration=asked.calibration,
                )  # fmt: skip
            except InputError as error:
                self._layouts[gpus] = error
        found = self._layouts[gpus]
        if isinstance(found, InputError):
            raise found
        return found
