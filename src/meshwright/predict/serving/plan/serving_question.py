"""What is asked of a plan for serving, and what is answered."""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.router import RoutingPolicy
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.serving_engine import VLLM, ServingEngine
from meshwright.predict.serving.plan.engine_candidates import EngineSpace
from meshwright.predict.serving.plan.engine_command import EngineTarget
from meshwright.predict.serving.sim.serving_fleet import ServingFleet
from meshwright.predict.serving.sim.serving_metrics import ServingMetrics
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import WorkloadRequest


class ServingQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served, on what, and how well."""

    model: Model
    cluster: Cluster
    requests: tuple[WorkloadRequest, ...]
    """In order of arrival, with times."""
    slo: dict[str, float]
    slo_attainment: float = 0.99
    """Share of the requests that have to keep to the objective."""
    max_gpus: int = 64
    quantization: Quantization = Quantization()
    engine: ServingEngine = VLLM
    routing: RoutingPolicy = "least-loaded"
    space: EngineSpace = EngineSpace()
    allow_disaggregated: bool = True
    """Whether engines for prompts alone are looked at as well."""
    target: EngineTarget | None = None
    """What is to run the plan; fleets that it cannot run are left out."""

    @property
    def allowed_gpus(self) -> int:
        """GPUs that a plan may take: those asked for, of the cluster, that the target reaches."""
        there = self.cluster.gpus_per_node if self.target == "meshwright" else self.cluster.gpus
        return min(self.max_gpus, there)

    def __post_init__(self) -> None:
        if not self.slo:
            fix = "say how long a first token may take, say"
            raise InputError([Problem("slo", "there is none", fix)])
        if len(self.requests) < 2 or self.requests[-1].arrival_s <= self.requests[0].arrival_s:
            what, fix = "they do not say when they arrive", "give a rate, or a trace with times"
            raise InputError([Problem("requests", what, fix)])


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that keeps to the objective, and what it comes to."""

    fleet: ServingFleet
    metrics: ServingMetrics


class ServingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plans that were found, the cheapest first."""

    plans: tuple[ServingPlan, ...]
    infeasible: dict[str, str]
    """Layouts that cannot do, with the reason."""
    impossible: bool
    """Whether no engine can have any of the degrees that were asked for."""
    pruned: int
    """Layouts whose bound alone is too dear to be shown."""
    simulations: int
    alternative: ServingPlan | None
    """The best plan of the other kind: with engines for prompts alone, or without."""
    smaller_fleet: ServingPlan | None
    """The best plan with one engine less, or what comes nearest to it with fewer GPUs: what it
    misses is what binds."""
    largest_infeasible: tuple[str, str] | None
    """The largest layout with fewer GPUs that cannot do, with the reason, where there is no such
    fleet."""
    best_effort: ServingPlan | None
    """Where there is no plan, the fleet that most requests keep to the objective with."""
