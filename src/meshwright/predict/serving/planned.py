"""What is asked of a plan for serving, and what is answered."""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.routing import Routing
from meshwright.predict.serving.engine import VLLM, Engine
from meshwright.predict.serving.engine_flags import Target
from meshwright.predict.serving.fleet import Fleet
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.outcome import Outcome
from meshwright.predict.serving.shapes import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Request


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
    impossible: bool
    """Whether no engine can have any of the degrees that were asked for."""
    beaten: int
    """Layouts whose bound alone is too dear to be shown."""
    simulations: int
    other: ServingPlan | None
    """The best plan of the other kind: with engines for prompts alone, or without."""
    fewer: ServingPlan | None
    """The best plan with one engine less, or what comes nearest to it with fewer GPUs: what it
    misses is what binds."""
    unfit: tuple[str, str] | None
    """The largest layout with fewer GPUs that cannot do, with the reason, where there is no such
    fleet."""
    nearest: ServingPlan | None
    """Where there is no plan, the fleet that most requests keep to the objective with."""
