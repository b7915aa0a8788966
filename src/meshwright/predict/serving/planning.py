"""`plan_serving`: the fewest GPUs that serve a stream of requests in time, and why so many.

Shapes of an engine are taken in the order of a bound on their cost. For each, the fewest engines
are found whose share of a sample keeps to the objective; what is cheaper than the best so far is
then simulated whole, behind the router. A shape whose bound is much dearer cannot win.
"""

from collections.abc import Callable
from math import ceil

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.routing import Routing
from meshwright.predict.serving.engine import VLLM, Engine
from meshwright.predict.serving.engine_flags import Target, cannot_run
from meshwright.predict.serving.fleet import Copies, Fleet, default_limits, run_fleet
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.outcome import Outcome, outcome_of
from meshwright.predict.serving.replica import Replica
from meshwright.predict.serving.shapes import Asked, Shape, Space, asked_of, layouts, shape_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.serving import Limits
from meshwright.spec.workload import Request

SAMPLE = 1500
"""Requests for each engine of a sample."""
RIVALS = 1.5
"""How much dearer than the best a plan may be to be shown beside it."""
PAIRS = 3
"""Shapes that are tried to decode beside the best one for prompts."""
STEPS = (None, 4096, 2048, 1024, 512)
"""Tokens of a step that are tried; None is the engine's own."""
Report = Callable[[str], None]


class ServingQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served, on what, and how well."""

    model: Model
    cluster: Cluster
    requests: tuple[Request, ...]
    """In order of arrival, with times."""
    objective: dict[str, float]
    attain: float = 0.99
    """Share of the requests that have to keep to the objective."""
    most_gpus: int = 64
    formats: Formats = Formats()
    engine: Engine = VLLM
    routing: Routing = "least-loaded"
    space: Space = Space()
    apart: bool = True
    """Whether engines for prompts alone are looked at as well."""
    target: Target | None = None
    """What is to run the plan; fleets that it cannot run are left out."""

    @property
    def allowed_gpus(self) -> int:
        """GPUs that a plan may take: those asked for, of the cluster, that the target reaches."""
        there = self.cluster.gpus_per_node if self.target == "meshwright" else self.cluster.gpus
        return min(self.most_gpus, there)

    def __post_init__(self) -> None:
        if not self.objective:
            fix = "say how long a first token may take, say"
            raise InputError([Problem("objective", "there is none", fix)])
        if len(self.requests) < 2 or self.requests[-1].arrival_s <= self.requests[0].arrival_s:
            what, fix = "they do not say when they arrive", "give a rate, or a trace with times"
            raise InputError([Problem("requests", what, fix)])


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that keeps to the objective, and what it comes to."""

    fleet: Fleet
    outcome: Outcome


class ServingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plans that were found, the cheapest first."""

    plans: tuple[ServingPlan, ...]
    refused: dict[str, str]
    """Layouts that cannot do, with the reason."""
    beaten: int
    """Layouts whose bound alone is too dear to be shown."""
    simulations: int
    fewer: ServingPlan | None
    """The best plan with one engine less: what it misses is what binds."""


def plan_serving(
    question: ServingQuestion, *, most: int = 5, report: Report | None = None
) -> ServingAnswer:
    """Return the cheapest fleets, one for each layout and split."""
    search = _Search(question, report or (lambda _: None))
    search.run()
    ranked = sorted(search.plans, key=lambda plan: (plan.fleet.gpus, _strain(plan, question)))
    plans = tuple(ranked[:most])
    fewer = search.with_one_less(plans[0].fleet) if plans else None
    return ServingAnswer(
        plans=plans,
        refused=search.refused,
        beaten=search.beaten,
        simulations=search.simulations,
        fewer=fewer,
    )


def _strain(plan: ServingPlan, question: ServingQuestion) -> float:
    """Return how near the latencies of one in a hundred are to what they may be."""
    latency = plan.outcome.latency
    asked = question.objective.items()
    return max((latency[name].p99_s / most for name, most in asked if name in latency), default=0.0)


class _Search:
    """The state of a search."""

    def __init__(self, question: ServingQuestion, report: Report) -> None:
        self.question, self.report = question, report
        self.asked: Asked = asked_of(list(question.requests))
        self.plans: list[ServingPlan] = []
        self.refused: dict[str, str] = {}
        self.beaten = self.simulations = 0

    @property
    def most_gpus(self) -> int:
        """GPUs beyond which a plan is of no interest."""
        most = self.question.allowed_gpus
        best = min((plan.fleet.gpus for plan in self.plans), default=most)
        return min(int(RIVALS * best), most)

    def run(self) -> None:
        """Look at every layout, those with the cheapest bound first."""
        asked = self.question
        shapes: list[tuple[int, int, Shape]] = []
        one = Replica(
            model=asked.model, cluster=asked.cluster, formats=asked.formats, engine=asked.engine
        )
        for layout in layouts(asked.model, asked.cluster, asked.allowed_gpus, asked.space):
            found = self._runnable(shape_of(layout, one, self.asked, asked.objective))
            if isinstance(found, str):
                self.refused[_name(layout)] = found
            else:
                shapes.append((self._least(found) * found.replica.gpus, len(shapes), found))
        for bound, _, shape in sorted(shapes, key=lambda one: one[:2]):
            if bound > self.most_gpus:
                self.beaten += 1
                continue
            self._together(shape)
            if asked.apart:
                self._apart(shape, shape)
        if asked.apart and shapes:
            self._paired([shape for _, _, shape in shapes])

    def _runnable(self, found: Shape | str) -> Shape | str:
        """Return a shape that whoever is to run it can run, or why not."""
        if isinstance(found, str) or self.question.target is None:
            return found
        alone = Copies(replica=found.replica, limits=_limits(found.replica, None))
        return cannot_run(Fleet(serving=alone), self.question.target) or found

    def _least(self, shape: Shape) -> int:
        return max(1, ceil(self.asked.rate_per_s * shape.least_s))

    def _together(self, shape: Shape) -> None:
        """Find the fewest engines of a shape that do everything."""
        replica, least = shape.replica, self._least(shape)
        most = self.most_gpus // replica.gpus
        best: Fleet | None = None
        for tokens in STEPS:
            fleet = self._fewest(replica, tokens, least, most)
            if fleet is not None and (best is None or fleet.gpus < best.gpus):
                best, most = fleet, fleet.serving.count - 1
            if most < least:
                break
        if best is not None:
            self._settle(best)

    def _fewest(self, replica: Replica, tokens: int | None, least: int, most: int) -> Fleet | None:
        """Return the fewest engines of which one keeps to the objective, with its share of all."""
        if most < least or (tokens is not None and tokens >= replica.engine.batch_tokens):
            return None
        copies = Copies(replica=replica, limits=_limits(replica, tokens))

        def fits(count: int) -> bool:
            share = self._sample(count)[::count]
            return self._keeps(Fleet(serving=copies), share)

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
        copies = msgspec.structs.replace(copies, count=high)
        return Fleet(serving=copies, routing=self.question.routing)

    def _paired(self, shapes: list[Shape]) -> None:
        """Let other shapes decode what the one that is cheapest for prompts computes."""
        first = min(shapes, key=lambda shape: shape.prompt_s * shape.replica.gpus)
        others = [shape for shape in shapes if shape is not first]
        others.sort(key=lambda shape: shape.answer_s * shape.replica.gpus)
        for shape in others[:PAIRS]:
            self._apart(first, shape)

    def _apart(self, first: Shape, then: Shape) -> None:
        """Find few engines of one shape for prompts, and few of another that decode.

        Where nothing can travel between them there are none.
        """
        try:
            self._split(first, then)
        except InputError as error:
            names = " → ".join(_name(shape.replica.layout) for shape in (first, then))
            self.refused[names] = error.problems[0].what

    def _split(self, first: Shape, then: Shape) -> None:
        rate = self.asked.rate_per_s
        before = max(1, ceil(rate * first.prompt_s))
        after = max(1, ceil(rate * then.answer_s))
        one, other = (
            Copies(replica=shape.replica, limits=_limits(shape.replica, None))
            for shape in (first, then)
        )
        while before * one.gpus + after * other.gpus <= self.most_gpus:
            fleet = Fleet(
                serving=msgspec.structs.replace(other, count=after),
                prefill=msgspec.structs.replace(one, count=before),
                routing=self.question.routing,
            )
            if self.question.target and (reason := cannot_run(fleet, self.question.target)):
                raise InputError([Problem("target", reason)])
            found = self._outcome(fleet, self._sample(before + after))
            if self._is_kept(found):
                self._settle(fleet)
                return
            missed = found.missed or {}
            late = max(missed.get("ttft", 0.0), missed.get("e2e", 0.0))
            slow = max(missed.get("itl", 0.0), missed.get("tpot", 0.0))
            # Who waits for blocks to decode in has a late first token as well.
            if late >= slow and found.kv_most < 0.95:
                before += 1
            else:
                after += 1

    def _settle(self, fleet: Fleet) -> None:
        """Simulate everything, with more engines or fewer until they are just enough.

        A share of a sample may be worse than what a router sends an engine, or better.
        """
        everything = list(self.question.requests)
        found = self._outcome(fleet, everything)
        if self._is_kept(found):
            kept = ServingPlan(fleet=fleet, outcome=found)
            while (fewer := self.with_one_less(kept.fleet)) and self._is_kept(fewer.outcome):
                kept = fewer
            self.plans.append(kept)
            return
        while fleet.gpus + fleet.serving.replica.gpus <= self.most_gpus:
            grown = msgspec.structs.replace(fleet.serving, count=fleet.serving.count + 1)
            fleet = msgspec.structs.replace(fleet, serving=grown)
            found = self._outcome(fleet, everything)
            if self._is_kept(found):
                self.plans.append(ServingPlan(fleet=fleet, outcome=found))
                return

    def with_one_less(self, fleet: Fleet) -> ServingPlan | None:
        """Return what becomes of a fleet with one engine less; None where no side can miss one."""
        replace = msgspec.structs.replace
        if fleet.serving.count > 1:
            fewer = replace(fleet.serving, count=fleet.serving.count - 1)
            fleet = replace(fleet, serving=fewer)
        elif fleet.prefill is not None and fleet.prefill.count > 1:
            fewer = replace(fleet.prefill, count=fleet.prefill.count - 1)
            fleet = replace(fleet, prefill=fewer)
        else:
            return None
        return ServingPlan(fleet=fleet, outcome=self._outcome(fleet, list(self.question.requests)))

    def _sample(self, engines: int) -> list[Request]:
        return list(self.question.requests[: SAMPLE * engines])

    def _keeps(self, fleet: Fleet, requests: list[Request]) -> bool:
        return self._is_kept(self._outcome(fleet, requests))

    def _is_kept(self, found: Outcome) -> bool:
        return (found.good_share or 0.0) >= self.question.attain

    def _outcome(self, fleet: Fleet, requests: list[Request]) -> Outcome:
        self.simulations += 1
        replica = fleet.serving.replica
        self.report(f"{self.simulations} simulated, {fleet.gpus} × {replica.cluster.gpu.name}")
        return outcome_of(run_fleet(fleet, requests), fleet, self.question.objective)


def _name(layout: Layout) -> str:
    """Return a name for the degrees of a layout."""
    degrees = (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp), ("ep", layout.ep))
    return " ".join(f"{name} {value}" for name, value in degrees if value > 1) or "1 GPU"


def _limits(replica: Replica, tokens: int | None) -> Limits:
    if tokens is None:
        return default_limits(replica)
    groups = replica.layout.dp
    requests = min(replica.engine.batch_requests, tokens) * groups
    return default_limits(replica, batch_tokens=tokens * groups, batch_requests=requests)
