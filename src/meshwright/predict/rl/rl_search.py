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
from meshwright.predict.rl.rl_metrics import RLMetrics, predict_rl
from meshwright.predict.rl.rl_setup import (
    DEFAULT_MEASURED_STEPS,
    RLSetup,
    RolloutBatch,
    take_gpu_share,
)
from meshwright.predict.rl.rollout_engines import require_kv_room
from meshwright.predict.rl.trainer_layout import find_trainer_layout
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import VLLM, ServingEngine
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

MAX_GPU_SPLITS = 16
"""Parts that GPUs are split into, about as many, where there are more."""
SCREENING_STEPS = 4
"""Steps that a simulation measures, or a round of them, which only says what to look at again."""
_CLOSE = 1.15
"""What was so many times as slow as the best in few steps may yet be better in many."""
_SPLITS = 2
"""Splits of a kind that are looked at again, where it is close to the best of all."""
Report = Callable[[str], None]


class RLQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be learned, and on how many GPUs."""

    model: Model
    cluster: Cluster
    """As large as the run: all its GPUs are used."""
    rollout_batch: RolloutBatch
    placements: tuple[Placement, ...] = PLACEMENTS
    max_staleness: int = 1
    """Of `async`."""
    engine_tp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Values of `tp` of an engine that are tried."""
    quantization: Quantization = Quantization()
    engine: ServingEngine = VLLM
    calibration: Calibration | None = None
    """What was measured on the GPUs, for both sides."""
    fixed_fields: dict[str, tuple[object, ...]] = {}
    """Fields of the trainer's layout that are given."""


class RLPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A setup and what it comes to."""

    setup: RLSetup
    metrics: RLMetrics


class RLAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The best of each placement and engine, the shortest step first."""

    plans: tuple[RLPlan, ...]
    infeasible: dict[str, str]
    """What cannot be done, with the reason."""
    simulations: int


def plan_rl(question: RLQuestion, *, most: int = 8, report: Report | None = None) -> RLAnswer:
    """Return the shortest steps there are, of `most` kinds and of the best synchronous one.

    Raises:
        InputError: where nothing fits, with the first reason.
    """
    search = _Search(question, report or (lambda _: None))
    for placement in question.placements:
        for degree in question.engine_tp_degrees:
            search.look(placement, degree)
    if not search.kinds:
        degrees = ", ".join(map(str, question.engine_tp_degrees))
        what = f"engines of {degrees} do not divide them"
        first = search.reason or Problem("engine_tp_degrees", what, "leave `engine_tp_degrees` out")
        what = f"nothing fits on {question.cluster.gpus} GPUs: {first.what}"
        raise InputError([first._replace(what=what)])
    plans = tuple(search.decide(most))
    return RLAnswer(plans=plans, infeasible=search.refused, simulations=search.simulations)


def _step_s(plan: RLPlan) -> float:
    return plan.metrics.step_s


class _Search:
    """The state of a search."""

    def __init__(self, question: RLQuestion, report: Report) -> None:
        self.question, self.report = question, report
        self.kinds: list[list[RLPlan]] = []
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

    def decide(self, most: int) -> list[RLPlan]:
        """Simulate the best kinds at length, and return them as that ranks them."""
        ranked = sorted(self.kinds, key=lambda kind: _step_s(kind[0]))
        exact = [kind for kind in ranked if not kind[0].setup.rollout_policy.max_staleness]
        ranked = [*ranked[:most], *(kind for kind in exact[:1] if kind not in ranked[:most])]
        limit = _CLOSE * _step_s(ranked[0][0])
        plans = [self._decided(kind, _step_s(kind[0]) <= limit) for kind in ranked]
        return sorted(plans, key=_step_s)

    def _decided(self, kind: list[RLPlan], is_close: bool) -> RLPlan:
        """Return the best split of a kind; of one that is far from the best of all, the first."""
        limit = _CLOSE * _step_s(kind[0])
        close = [one for one in kind[:_SPLITS] if _step_s(one) <= limit]
        found = []
        for one in close if is_close else close[:1]:
            self.report(f"{self.simulations} simulated, {one.setup.placement} at length")
            setup = msgspec.structs.replace(one.setup, measured_steps=DEFAULT_MEASURED_STEPS)
            found.append(RLPlan(setup=setup, metrics=predict_rl(setup, even=False)))
            self.simulations += 1
        return min(found, key=_step_s)

    def _valley(self, placement: Placement, degree: int, gpus: int) -> list[RLPlan | None]:
        """Return splits down to the best of all, where the step has one valley over them."""
        # Both sides have whole nodes, where there are several, and engines are whole.
        node = self.question.cluster.gpus_per_node
        part = lcm(degree, node if gpus > node else 1)
        part *= max(1, gpus // (MAX_GPU_SPLITS * part))
        splits = list(range(part, gpus, part))
        seen: dict[int, RLPlan | None] = {}

        def at(place: int) -> float:
            if place not in seen:
                rollout = splits[place]
                seen[place] = self._tried(placement, degree, rollout, gpus - rollout)
            found = seen[place]
            return float("inf") if found is None else found.metrics.step_s

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
    ) -> RLPlan | None:
        asked = self.question
        stale = asked.max_staleness if placement == "async" else None
        name = f"{placement}, engines of {degree}, {rollout} + {training} GPUs"
        self.report(f"{self.simulations} simulated, {name}")
        try:
            replica = Replica(
                model=asked.model, cluster=asked.cluster, quantization=asked.quantization,
                layout=Layout(tp=degree), engine=asked.engine, calibration=asked.calibration,
            )  # fmt: skip
            engines = ReplicaPool(
                replica=replica,
                scheduler_config=default_scheduler_config(replica),
                count=rollout // degree,
            )
            require_kv_room(engines, asked.rollout_batch)
            setup = RLSetup(
                model=asked.model, cluster=asked.cluster, placement=placement, rollout_pool=engines,
                trainer_layout=self._layout(training), rollout_batch=asked.rollout_batch,
                max_staleness=stale, measured_steps=max(SCREENING_STEPS, 1 + (stale or 0)),
            )  # fmt: skip
            self.simulations += 1
            return RLPlan(setup=setup, metrics=predict_rl(setup, even=False))
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
                self._layouts[gpus] = find_trainer_layout(
                    asked.model,
                    take_gpu_share(asked.cluster, gpus),
                    asked.rollout_batch,
                    asked.fixed_fields,
                    calibration=asked.calibration,
                )
            except InputError as error:
                self._layouts[gpus] = error
        found = self._layouts[gpus]
        if isinstance(found, InputError):
            raise found
        return found
