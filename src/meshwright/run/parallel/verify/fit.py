"""What keeps a layout from running a model at all, so that nothing is verified in vain.

Layouts are held against the real model, not the small one: what cannot be laid out there is no
question of exactness.
"""

from meshwright.errors import Problem
from meshwright.run.parallel.refusals import refused
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import Training

_STAND_IN = "h100-superpod"
"""The cluster a layout is held against; what is asked about the cluster itself is left out."""
_ABOUT_CLUSTER = {"dp", "precision", "memory"}


def problems_of(
    model: Model, layout: Layout, *, sequence: int, sequences: int
) -> tuple[Problem, ...]:
    """Return every reason why a layout cannot run so many sequences of a length."""
    cluster = catalog.cluster(_STAND_IN)
    step = Training(sequence_length=sequence, global_batch=sequences, tokens=sequence * sequences)
    found = [
        problem
        for problem in layout.check(model, cluster, step)
        if problem.where not in _ABOUT_CLUSTER
    ]
    known = {problem.where for problem in found}
    found += [problem for problem in refused(model, layout) if problem.where not in known]
    if layout.offload:
        found.append(Problem("offload", "is not done by this trainer", "leave it out"))
    return tuple(found)
