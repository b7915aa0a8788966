"""What keeps a model from being trained under a layout at all, found without any process group."""

from importlib.util import find_spec

from meshwright.errors import Problem
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import Training

_STAND_IN = "h100-superpod"
"""The cluster that a layout is held against; what is asked about the cluster itself is left out."""
_ABOUT_CLUSTER = {"dp", "precision", "memory"}
"""What is asked about the cluster: this one only stands in."""


def misfits(model: Model, layout: Layout, workload: Training | None) -> list[Problem]:
    """Return every reason why the ranks of a layout could not train on a workload, by field.

    Without a workload, lengths and batches are not held against it.
    """
    cluster = catalog.cluster(_STAND_IN)
    found = [
        problem
        for problem in layout.check(model, cluster, workload)
        if problem.where not in _ABOUT_CLUSTER
    ]
    # What the description rules out already need not be said by those who would run it.
    known = {problem.where for problem in found}
    # A login node that only writes a job may lack torch; the ranks look again.
    if layout.gpus > 1 and find_spec("torch") is not None:
        from meshwright.run.parallel.refusals import refused

        found += [problem for problem in refused(model, layout) if problem.where not in known]
    return found + lacking(layout)


def lacking(layout: Layout) -> list[Problem]:
    """Return what of a layout this trainer does for no model."""
    if not layout.offload:
        return []
    return [Problem("offload", "is not done by this trainer", "leave it out")]
