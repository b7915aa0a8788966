"""What layouts can say and no rank can run yet, from every part of `run/parallel`."""

from meshwright.errors import Problem
from meshwright.run.parallel import context, experts, pipeline, tensor
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model


def refused(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps a model from being trained under a layout, each with a fix."""
    return [
        problem._replace(where=problem.where.removeprefix("layout."))
        for part in (tensor, context, experts, pipeline)
        for problem in part.problems(model, layout)
    ]
