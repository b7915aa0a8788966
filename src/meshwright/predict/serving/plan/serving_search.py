"""`plan_serving`: the fewest GPUs that serve a stream of requests in time, and why so many.

Shapes of an engine are taken in the order of a bound on their cost. For each, the fewest engines
are found whose share of a sample keeps to the objective; what is cheaper than the best so far is
then simulated whole, behind the router. A shape whose bound is much dearer cannot win.
"""

from collections.abc import Callable
from math import ceil

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.plan.engine_candidates import (
    EngineCandidate,
    RequestStats,
    build_candidate,
    compute_request_stats,
    list_engine_layouts,
)
from meshwright.predict.serving.plan.engine_command import find_unsupported
from meshwright.predict.serving.plan.serving_question import (
    ServingAnswer,
    ServingPlan,
    ServingQuestion,
)
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    default_scheduler_config,
    simulate_fleet,
)
from meshwright.predict.serving.sim.serving_metrics import ServingMetrics, compute_serving_metrics
from meshwright.spec.layout.layout_names import format_short_name
from meshwright.spec.scheduler_config import SchedulerConfig

SAMPLE_REQUESTS = 1500
"""Requests for each engine of a sample."""
MAX_COST_RATIO = 1.5
"""How much dearer than the best a plan may be to be shown beside it."""
MAX_PAIRED_LAYOUTS = 3
"""Shapes that are tried to decode beside the best one for prompts."""
STEP_TOKEN_LIMITS = (None, 4096, 2048, 1024, 512)
"""Tokens of a step that are tried; None is the engine's own."""
Report = Callable[[str], None]


def plan_serving(
    question: ServingQuestion, *, most: int = 5, report: Report | None = None
) -> ServingAnswer:
    """Return the cheapest fleets, one for each layout and split."""
    search = _Search(question, report or (lambda _: None))
    search.run()
    ranked = sorted(search.plans, key=lambda plan: (plan.fleet.gpus, _strain(plan, question)))
    nearest = None if ranked else search.nearest(question.allowed_gpus + 1)
    if nearest is not None and search.is_kept(nearest.metrics):
        # Its bound was too dear, and a bound has been wrong.
        ranked, nearest = [nearest], None
    fewer = None
    while ranked:
        fewer = search.with_fewer(ranked[0].fleet)
        if fewer is None or not search.is_kept(fewer.metrics):
            break
        # A share of a sample had said otherwise.
        ranked.insert(0, fewer)
    others = [plan for plan in ranked if _is_apart(plan) != _is_apart(ranked[0])]
    return ServingAnswer(
        plans=tuple(ranked[:most]),
        infeasible=search.refused,
        impossible=not search.shapes and not search.refused_gpus,
        pruned=search.beaten,
        alternative=others[0] if others else None,
        smaller_fleet=fewer,
        largest_infeasible=search.unfit(ranked[0].fleet.gpus) if ranked and fewer is None else None,
        best_effort=nearest,
        simulations=search.simulations,
    )


def _is_apart(plan: ServingPlan) -> bool:
    return plan.fleet.prefill_pool is not None


def _strain(plan: ServingPlan, question: ServingQuestion) -> float:
    """Return how near the latencies of one in a hundred are to what they may be."""
    latency = plan.metrics.latency
    asked = question.slo.items()
    return max((latency[name].p99_s / most for name, most in asked if name in latency), default=0.0)


class _Search:
    """The state of a search."""

    def __init__(self, question: ServingQuestion, report: Report) -> None:
        self.question, self.report = question, report
        self.asked: RequestStats = compute_request_stats(
            list(question.requests), question.slo_attainment
        )
        self.plans: list[ServingPlan] = []
        self.shapes: list[tuple[int, int, EngineCandidate]] = []
        """Layouts that can do, with the GPUs that they take by their bound."""
        self.refused: dict[str, str] = {}
        self.refused_gpus: dict[str, int] = {}
        self.misses: dict[int, tuple[float, ServingFleet]] = {}
        """For each number of GPUs the fleet that came nearest, with the share that it keeps."""
        self.outcomes: dict[tuple[ServingFleet, int, int, int], ServingMetrics] = {}
        """What was simulated: fleets, each with the part of the requests that it served."""
        self.beaten = self.simulations = 0

    @property
    def most_gpus(self) -> int:
        """GPUs beyond which a plan is of no interest."""
        most = self.question.allowed_gpus
        best = min((plan.fleet.gpus for plan in self.plans), default=most)
        return min(int(MAX_COST_RATIO * best), most)

    def run(self) -> None:
        """Look at every layout, those with the cheapest bound first."""
        asked = self.question
        one = Replica(
            model=asked.model,
            cluster=asked.cluster,
            quantization=asked.quantization,
            engine=asked.engine,
        )
        there = list_engine_layouts(asked.model, asked.cluster, asked.allowed_gpus, asked.space)
        self.refused.update(there.infeasible)
        for layout in there.layouts:
            found = self._runnable(build_candidate(layout, one, self.asked, asked.slo))
            if isinstance(found, str):
                self.refused[format_short_name(layout)] = found
                self.refused_gpus[format_short_name(layout)] = layout.gpus
            else:
                bound = self._least(found) * found.replica.gpus
                self.shapes.append((bound, len(self.shapes), found))
        self.shapes.sort(key=lambda one: one[:2])
        for bound, _, shape in self.shapes:
            if bound > self.most_gpus:
                self.beaten += 1
                continue
            self._together(shape)
            if asked.allow_disaggregated:
                self._apart(shape, shape)
        if asked.allow_disaggregated and self.shapes:
            self._paired([shape for _, _, shape in self.shapes])

    def _runnable(self, found: EngineCandidate | str) -> EngineCandidate | str:
        """Return a shape that whoever is to run it can run, or why not."""
        if isinstance(found, str) or self.question.target is None:
            return found
        alone = ReplicaPool(replica=found.replica, scheduler_config=_limits(found.replica, None))
        return find_unsupported(ServingFleet(serving_pool=alone), self.question.target) or found

    def _least(self, shape: EngineCandidate) -> int:
        return max(1, ceil(self.asked.rate_per_s * shape.bound_s))

    def _together(self, shape: EngineCandidate) -> None:
        """Find the fewest engines of a shape that do everything."""
        replica, least = shape.replica, self._least(shape)
        most = self.most_gpus // replica.gpus
        best: ServingFleet | None = None
        for tokens in STEP_TOKEN_LIMITS:
            fleet = self._fewest(replica, tokens, least, most)
            if fleet is not None and (best is None or fleet.gpus < best.gpus):
                best, most = fleet, fleet.serving_pool.count - 1
            if most < least:
                break
        if best is not None:
            self._settle(best)

    def _fewest(
        self, replica: Replica, tokens: int | None, least: int, most: int
    ) -> ServingFleet | None:
        """Return the fewest engines of which one keeps to the objective, with its share of all."""
        if most < least or (tokens is not None and tokens >= replica.engine.max_num_batched_tokens):
            return None
        copies = ReplicaPool(replica=replica, scheduler_config=_limits(replica, tokens))

        def fits(count: int) -> bool:
            found = self._outcome(
                ServingFleet(serving_pool=copies), slice(0, SAMPLE_REQUESTS * count, count)
            )
            return self._judge(self._fleet(copies, count), found)

        high, step = least, 1
        while not fits(high):
            if high >= most:
                return None
            least, high, step = high + 1, min(high + step, most), 2 * step
        while least < high:
            middle = (least + high) // 2
            if fits(middle):
                high = middle
            else:
                least = middle + 1
        return self._fleet(copies, high)

    def _fleet(self, copies: ReplicaPool, count: int) -> ServingFleet:
        many = msgspec.structs.replace(copies, count=count)
        return ServingFleet(serving_pool=many, routing=self.question.routing)

    def _paired(self, shapes: list[EngineCandidate]) -> None:
        """Let other shapes decode what the one that is cheapest for prompts computes."""
        first = min(shapes, key=lambda shape: shape.prefill_bound_s * shape.replica.gpus)
        others = [shape for shape in shapes if shape is not first]
        others.sort(key=lambda shape: shape.decode_bound_s * shape.replica.gpus)
        for shape in others[:MAX_PAIRED_LAYOUTS]:
            self._apart(first, shape)

    def _apart(self, first: EngineCandidate, then: EngineCandidate) -> None:
        """Find few engines of one shape for prompts, and few of another that decode.

        Where nothing can travel between them there are none.
        """
        try:
            self._split(first, then)
        except InputError as error:
            names = " → ".join(format_short_name(shape.replica.layout) for shape in (first, then))
            self.refused[names] = error.problems[0].what

    def _split(self, first: EngineCandidate, then: EngineCandidate) -> None:
        rate = self.asked.rate_per_s
        before = max(1, ceil(rate * first.prefill_bound_s))
        after = max(1, ceil(rate * then.decode_bound_s))
        one, other = (
            ReplicaPool(replica=shape.replica, scheduler_config=_limits(shape.replica, None))
            for shape in (first, then)
        )
        while before * one.gpus + after * other.gpus <= self.most_gpus:
            fleet = ServingFleet(
                serving_pool=msgspec.structs.replace(other, count=after),
                prefill_pool=msgspec.structs.replace(one, count=before),
                routing=self.question.routing,
            )
            if self.question.target and (reason := find_unsupported(fleet, self.question.target)):
                raise InputError([Problem("target", reason)])
            found = self._outcome(fleet, slice(SAMPLE_REQUESTS * (before + after)))
            if self._judge(fleet, found):
                self._settle(fleet)
                return
            missed = found.slo_violations or {}
            late = max(missed.get("ttft", 0.0), missed.get("e2e", 0.0))
            slow = max(missed.get("itl", 0.0), missed.get("tpot", 0.0))
            # Who waits for blocks to decode in has a late first token as well.
            if late >= slow and found.max_kv_usage < 0.95:
                before += 1
            else:
                after += 1

    def _settle(self, fleet: ServingFleet) -> None:
        """Simulate everything, with more engines or fewer until they are just enough.

        A share of a sample may be worse than what a router sends an engine, or better.
        """
        found = self._outcome(fleet)
        if self._judge(fleet, found):
            kept = ServingPlan(fleet=fleet, metrics=found)
            while (fewer := self._with_one_less(kept.fleet)) and self.is_kept(fewer.metrics):
                kept = fewer
            self.plans.append(kept)
            return
        while fleet.gpus + fleet.serving_pool.replica.gpus <= self.most_gpus:
            grown = msgspec.structs.replace(fleet.serving_pool, count=fleet.serving_pool.count + 1)
            fleet = msgspec.structs.replace(fleet, serving_pool=grown)
            found = self._outcome(fleet)
            if self._judge(fleet, found):
                self.plans.append(ServingPlan(fleet=fleet, metrics=found))
                return

    def with_fewer(self, fleet: ServingFleet) -> ServingPlan | None:
        """Return what becomes of a fleet with one engine less, or nearly so with fewer GPUs."""
        return self._with_one_less(fleet) or self.nearest(fleet.gpus)

    def _with_one_less(self, fleet: ServingFleet) -> ServingPlan | None:
        """Return what becomes of a fleet with one engine less; None where no side can miss one."""
        replace = msgspec.structs.replace
        if fleet.serving_pool.count > 1:
            fewer = replace(fleet.serving_pool, count=fleet.serving_pool.count - 1)
            return self._whole(replace(fleet, serving_pool=fewer))
        if fleet.prefill_pool is not None and fleet.prefill_pool.count > 1:
            fewer = replace(fleet.prefill_pool, count=fleet.prefill_pool.count - 1)
            return self._whole(replace(fleet, prefill_pool=fewer))
        return None

    def nearest(self, gpus: int) -> ServingPlan | None:
        """Return what most requests keep to the objective with on fewer GPUs than that.

        It is the best that was simulated, or as many engines as there can be of the cheapest shape.
        """
        known = [(share, -n, fleet) for n, (share, fleet) in self.misses.items() if n < gpus]
        fleets = [max(known, key=lambda one: one[:2])[2]] if known else []
        small = [shape.replica for _, _, shape in self.shapes if shape.replica.gpus < gpus]
        if small:
            copies = ReplicaPool(replica=small[0], scheduler_config=_limits(small[0], None))
            fleets.append(self._fleet(copies, (gpus - 1) // small[0].gpus))
        tried = [self._whole(fleet) for fleet in dict.fromkeys(fleets)]
        return max(tried, key=lambda plan: plan.metrics.slo_attainment or 0.0, default=None)

    def unfit(self, gpus: int) -> tuple[str, str] | None:
        """Return the largest layout with fewer GPUs than that which cannot do, and why."""
        small = [name for name, count in self.refused_gpus.items() if count < gpus]
        if not small:
            return None
        name = max(small, key=lambda one: self.refused_gpus[one])
        return name, self.refused[name]

    def _whole(self, fleet: ServingFleet) -> ServingPlan:
        return ServingPlan(fleet=fleet, metrics=self._outcome(fleet))

    def is_kept(self, found: ServingMetrics) -> bool:
        """Tell whether enough requests keep to the objective."""
        return (found.slo_attainment or 0.0) >= self.question.slo_attainment

    def _judge(self, fleet: ServingFleet, found: ServingMetrics) -> bool:
        """Tell the same of a fleet, and remember it where it is not enough."""
        share = found.slo_attainment or 0.0
        if not self.is_kept(found) and share >= self.misses.get(fleet.gpus, (0.0,))[0]:
            self.misses[fleet.gpus] = (share, fleet)
        return self.is_kept(found)

    def _outcome(self, fleet: ServingFleet, sample: slice = slice(None)) -> ServingMetrics:
        """Return how some of the requests fare with a fleet, or all of them."""
        requests = self.question.requests
        # A sample may be all there are, and a fleet may come up twice.
        known = self.outcomes.get(key := (fleet, *sample.indices(len(requests))))
        if known is None:
            self.simulations += 1
            gpu = fleet.serving_pool.replica.cluster.gpu
            self.report(f"{self.simulations} simulated, {fleet.gpus} × {gpu.name}")
            served = simulate_fleet(fleet, list(requests[sample]))
            known = self.outcomes[key] = compute_serving_metrics(served, fleet, self.question.slo)
        return known


def _limits(replica: Replica, tokens: int | None) -> SchedulerConfig:
    if tokens is None:
        return default_scheduler_config(replica)
    groups = replica.layout.dp
    requests = min(replica.engine.max_num_seqs, tokens) * groups
    return default_scheduler_config(
        replica, max_num_batched_tokens=tokens * groups, max_num_seqs=requests
    )
