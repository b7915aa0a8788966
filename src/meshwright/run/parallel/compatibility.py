"""What keeps a model from being trained under a layout at all, found without any process group."""

from importlib.util import find_spec

from meshwright.errors import Problem
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload


def find_unsupported_combinations(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps a model from being trained under a layout, each with a fix."""
    # These modules import torch, which a login node may lack.
    from meshwright.run.parallel.context_parallel.context_parallel import (
        find_context_parallel_problems,
    )
    from meshwright.run.parallel.expert_parallel.token_dispatcher import (
        find_expert_parallel_problems,
    )
    from meshwright.run.parallel.forward_backward import find_pipeline_problems
    from meshwright.run.parallel.tensor_parallel.tensor_parallel import (
        find_tensor_parallel_problems,
    )

    problems = [
        *find_tensor_parallel_problems(model, layout),
        *find_context_parallel_problems(model, layout),
        *find_expert_parallel_problems(model, layout),
        *find_pipeline_problems(model, layout),
    ]
    return [problem._replace(where=problem.where.removeprefix("layout.")) for problem in problems]


_STAND_IN = "h100-superpod"
"""The cluster that a layout is held against; what is asked about the cluster itself is left out."""

_ABOUT_CLUSTER = {"dp", "precision", "memory"}
"""What is asked about the cluster: this one only stands in."""


def find_layout_problems(
    model: Model, layout: Layout, workload: TrainingWorkload | None
) -> list[Problem]:
    """Return every reason why the ranks of a layout could not train on a workload, by field.

    Without a workload, lengths and batches are not held against it.
    """
    cluster = catalog.get_cluster(_STAND_IN)
    found = [
        problem
        for problem in layout.check(model, cluster, workload)
        if problem.where not in _ABOUT_CLUSTER
    ]
    # What the description rules out already need not be said by those who would run it.
    known = {problem.where for problem in found}
    # A login node that only writes a job may lack torch; the ranks look again.
    if layout.gpus > 1 and find_spec("torch") is not None:
        found += [
            problem
            for problem in find_unsupported_combinations(model, layout)
            if problem.where not in known
        ]
    return found + find_unsupported_layout_options(layout)


def find_unsupported_layout_options(layout: Layout) -> list[Problem]:
    """Return what of a layout this trainer does for no model."""
    if not layout.offload:
        return []
    return [Problem("offload", "is not supported by the trainer", "leave it out")]


def find_verify_problems(
    model: Model, layout: Layout, *, sequence_length: int, global_batch: int
) -> tuple[Problem, ...]:
    """Return every reason why a layout cannot run so many sequences of a length."""
    step = TrainingWorkload(
        sequence_length=sequence_length,
        global_batch=global_batch,
        tokens=sequence_length * global_batch,
    )
    return tuple(find_layout_problems(model, layout, step))
