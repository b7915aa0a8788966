"""Why no layout of a question fits, and by how much the nearest one misses."""

from meshwright.errors import InputError, Problem
from meshwright.predict.plan.question import Question


def nothing_fits(question: Question) -> InputError:
    """Return an error that says which constraint kills the last candidates, and by how much."""
    what = f"no layout of {question.model.name} fits on {question.gpus:,} GPUs"
    return InputError([Problem("layout", what, "use more GPUs")])
