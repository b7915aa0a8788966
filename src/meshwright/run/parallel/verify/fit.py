"""What keeps a layout from running a model at all, so that nothing is verified in vain.

Layouts are held against the real model, not the small one: what cannot be laid out there is no
question of exactness.
"""

from meshwright.errors import Problem
from meshwright.run.parallel.fit import misfits
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import Training


def problems_of(
    model: Model, layout: Layout, *, sequence: int, sequences: int
) -> tuple[Problem, ...]:
    """Return every reason why a layout cannot run so many sequences of a length."""
    step = Training(sequence_length=sequence, global_batch=sequences, tokens=sequence * sequences)
    return tuple(misfits(model, layout, step))
