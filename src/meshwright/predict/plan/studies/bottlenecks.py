"""What binds a plan: memory, the bubble, links, kernels, the host.

All costs are seconds of one step. Those of a part of the step are all that it takes, which is more
than any cure could save; those of a limit (memory, the host's pace, imbalance) are what the step
would take less without it, everything else being predicted anew.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.network import Placement
from meshwright.predict.plan.answer.explanation import format_layout_fields
from meshwright.predict.plan.answer.plan_answer import Plan, PlanAnswer
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import (
    PlanCandidate,
    PlanSearch,
    restrict_to_common_layouts,
)
from meshwright.predict.plan.studies.pareto_front import min_bytes_needed
from meshwright.predict.step.block_comm import build_group_placement, list_neighbor_placements
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.whatif.whatif_parameters import WHATIF_PARAMETERS
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_changes import list_changed_fields
from meshwright.spec.units import format_bytes, format_seconds
from meshwright.spec.workload import TrainingWorkload

MEMORY_FACTOR = 1.1
"""How much more memory is tried."""
MIN_COST_SHARE = 0.002
"""Share of the step below which a cost is not worth a line."""
MIN_SAVING_SHARE = 0.05
"""Share of an exchange below which what twice the bandwidth saves is hardly anything."""
_EXCHANGES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "dp": "data",
}


class PlanBottleneck(NamedTuple):
    """Something that keeps a plan from being faster."""

    resource: str
    """compute, recompute, memory, bubble, network, nvlink (or the cluster's other fast links),
    host, host pace, expert imbalance, optimizer."""
    evidence: str
    """One sentence with figures."""
    cost_s: float
    """Seconds of a step it costs; for memory what a tenth more would save."""


def find_bottlenecks(answer: PlanAnswer, *, exact: bool = False) -> tuple[PlanBottleneck, ...]:
    """Return what binds the winner of an answer, the costliest first.

    What a tenth more memory would save is searched for, among usual layouts and the winner's own
    choices unless `exact`; then the saving is no more than a lower bound.
    """
    question, plan = answer.question, answer.best
    found = [
        *_parts(plan),
        *_links(plan, question),
        *_limits(plan, question),
    ]
    worth = [one for one in found if one.cost_s >= MIN_COST_SHARE * plan.step.step_s]
    worth.append(_memory(question, plan, exact))
    return tuple(sorted(worth, key=lambda one: -one.cost_s))


def _parts(plan: Plan) -> Iterator[PlanBottleneck]:
    """Yield what the step spends on its own rank."""
    step, layout, training = plan.step, plan.layout, plan.job.workload
    assert isinstance(training, TrainingWorkload)
    ideal_s = step.mfu * step.step_s
    yield PlanBottleneck(
        "compute",
        f"kernels take {_of(step.compute_s, step.step_s)}; at the {layout.precision} peak all "
        f"useful FLOPs would take {format_seconds(ideal_s)}",
        step.compute_s,
    )
    yield PlanBottleneck(
        "recompute",
        f"forward work done again takes {_of(step.recompute_s, step.step_s)}, to save memory",
        step.recompute_s,
    )
    count = layout.count_microbatches(layout.global_batch or training.global_batch)
    yield PlanBottleneck(
        "bubble",
        f"ranks wait for other stages for {_of(step.bubble_s, step.step_s)}: {count} microbatches "
        f"on {layout.pp} stages under {layout.schedule}",
        step.bubble_s,
    )
    yield PlanBottleneck(
        "optimizer",
        f"gradient norm and update take {_of(step.optimizer_s, step.step_s)}",
        step.optimizer_s,
    )
    yield PlanBottleneck(
        "host",
        f"transfers to and from host memory that do not hide take "
        f"{_of(step.offload_s, step.step_s)}",
        step.offload_s,
    )


def _of(part_s: float, whole_s: float) -> str:
    return f"{format_seconds(part_s)} ({part_s / whole_s:.1%} of the step)"


def _links(plan: Plan, question: PlanQuestion) -> Iterator[PlanBottleneck]:
    """Yield exposed communication by the link that holds it up."""
    step, by_link = plan.step, defaultdict[str, dict[str, float]](dict)
    faster = {link: _with_twice(plan.job, link, question) for link in ("network", "fast links")}
    for axis in _EXCHANGES:
        seconds = getattr(step, f"{axis}_s")
        if seconds > 0:
            by_link[_holding_up(plan, axis, faster)][axis] = seconds
    for link, exposed in by_link.items():
        total_s = sum(exposed.values())
        said = ", ".join(
            f"{_EXCHANGES[axis]} {format_seconds(seconds)}"
            for axis, seconds in sorted(exposed.items(), key=lambda one: -one[1])
        )
        evidence = f"exposed exchange takes {_of(total_s, step.step_s)}: {said}"
        better = faster.get(link)
        if better is not None:
            left_s = sum(getattr(better, f"{axis}_s") for axis in exposed)
            saved_s = max(0.0, total_s - left_s)
            evidence += f"; twice the bandwidth would save this layout {format_seconds(saved_s)}"
        name = plan.job.cluster.scale_up.kind if link == "fast links" else link
        yield PlanBottleneck(name, evidence, total_s)


def _holding_up(plan: Plan, axis: str, faster: dict[str, StepPrediction | None]) -> str:
    """Return the link whose bandwidth shortens an axis' exposed exchange most.

    A ring that leaves its node may still be held up by the links inside. Where bandwidth hardly
    matters, it is the slowest link that the axis' groups cross.
    """
    name = f"{axis}_s"
    now_s = getattr(plan.step, name)
    saved = {link: now_s - getattr(step, name) for link, step in faster.items() if step is not None}
    best = max(saved, key=lambda link: saved[link], default=None)
    if best is not None and saved[best] >= MIN_SAVING_SHARE * now_s:
        return best
    return find_slowest_link(plan.job, axis)


def find_slowest_link(work: JobSpec, axis: str) -> str:
    """Return the slowest link that an axis' groups cross: network, host or fast links."""
    cluster, layout = work.cluster, work.layout
    groups: list[Placement]
    if axis == "pp":
        groups = [pair for pair, _ in list_neighbor_placements(cluster, layout, "pp")]
    else:
        groups = [build_group_placement(cluster, layout, "dp-cp" if axis == "dp" else axis)]
    if any(group.domains > 1 for group in groups):
        return "network"
    return "host" if any(group.intra_link == "host" for group in groups) else "fast links"


def _with_twice(work: JobSpec, link: str, question: PlanQuestion) -> StepPrediction | None:
    """Return the step of the same layout with a link of twice the bandwidth.

    Cards double together with the links to the host, through which GPUs reach them.
    """
    try:
        work = WHATIF_PARAMETERS["nic" if link == "network" else "nvlink"].apply(work, "x2").job
    except InputError:
        return None  # there is no such link
    if link == "network":
        host = work.cluster.host
        host = replace(host, gpu_bytes_per_s=2 * host.gpu_bytes_per_s)
        work = replace(work, cluster=replace(work.cluster, host=host))
    return _predicted(work, question)


def _predicted(work: JobSpec, question: PlanQuestion, *, graphs: bool = False) -> StepPrediction:
    software = replace(question.framework, cuda_graphs=True) if graphs else question.framework
    return predict_step(TrainingRun(work, framework=software, calibration=question.calibration))


def _limits(plan: Plan, question: PlanQuestion) -> Iterator[PlanBottleneck]:
    """Yield what the step would take less without the host's pace and without imbalance."""
    work, step_s = plan.job, plan.step.step_s
    assert isinstance(work.workload, TrainingWorkload)
    if not question.framework.cuda_graphs:
        launched = _predicted(work, question, graphs=True).step_s
        evidence = (
            f"kernels wait for the host to launch them; CUDA graphs would save "
            f"{_of(step_s - launched, step_s)}"
        )
        yield PlanBottleneck("host pace", evidence, step_s - launched)
    imbalance = work.workload.expert_imbalance
    if imbalance > 1:
        level = replace(work, workload=replace(work.workload, expert_imbalance=1.0))
        saved_s = step_s - _predicted(level, question).step_s
        evidence = (
            f"the busiest rank's experts get {imbalance:g} times the mean; balance would save "
            f"{_of(saved_s, step_s)}"
        )
        yield PlanBottleneck("expert imbalance", evidence, saved_s)


def _memory(question: PlanQuestion, plan: Plan, exact: bool) -> PlanBottleneck:
    """Return how full the fullest GPU is, and what a tenth more memory would save."""
    room, need = question.usable_cluster.gpu.memory_bytes, min_bytes_needed(plan.memory)
    better = plan_with_more_memory(question, plan, exact=exact)
    saved_s = plan.step.step_s - better.step.step_s
    if saved_s > 0:
        changes = list_changed_fields(plan.layout, better.layout)
        said = format_layout_fields(better.layout, tuple(changes))
        then = f"a tenth more would save {_of(saved_s, plan.step.step_s)} with {said}"
    else:
        then = "a tenth more would save nothing"
        then += "" if exact else " among usual layouts"
    evidence = (
        f"{format_bytes(need)} of {format_bytes(room)} ({need / room:.0%}) are needed; {then}"
    )
    return PlanBottleneck("memory", evidence, saved_s)


def plan_with_more_memory(
    question: PlanQuestion, plan: Plan, *, exact: bool = False
) -> PlanCandidate:
    """Return the fastest layout where GPUs have a tenth more memory; the plan's own at the worst.

    It is searched for among usual layouts and the plan's own choices unless `exact`.
    """
    gpu = question.cluster.gpu
    larger = replace(gpu, memory_bytes=round(MEMORY_FACTOR * gpu.memory_bytes))
    roomy = replace(question, cluster=replace(question.cluster, gpu=larger))
    space = roomy if exact else _around(roomy, plan.layout)
    known = PlanCandidate(plan.layout, plan.step)  # more memory does not change its step
    search = PlanSearch(space, max_plans=1, known=[known])
    search.run()
    return search.best[0]


def _around(question: PlanQuestion, layout: Layout) -> PlanQuestion:
    """Return the question with usual layouts and those that share choices with one layout."""
    few = restrict_to_common_layouts(question)
    fixed = {
        name: tuple(dict.fromkeys((*values, getattr(layout, name))))
        for name, values in few.space.fixed.items()
    }
    return replace(few, space=replace(few.space, fixed=fixed))
