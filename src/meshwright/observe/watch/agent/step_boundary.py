"""What ends a step of a job: an optimizer, or a CUDA graph that holds one."""

STRANGER_STEPS = 64
"""So many steps of another one, with none of the lead's between, and the lead is gone."""


class StepBoundary:
    """Told each time an optimizer has stepped, it says whether that ends a step of the job.

    A job may have several optimizers (one for matrices and one for the rest, one per parameter
    that steps within backward): the first to step is followed, and the others are parts of its
    steps. Where it is seen no more, as in another phase of training, the next one is followed.

    Where a whole step is replayed as a CUDA graph, the optimizer in it is seen no more either. A
    graph is followed as any other that takes the lead's place, but never from its first replay: a
    job that replays only its passes steps its optimizer all the same.
    """

    def __init__(self) -> None:
        self._followed: int | None = None
        self._strangers: dict[int, int] = {}

    def is_step_end(self, number: int, *, graph: bool = False) -> bool:
        """Tell whether what this number stands for has ended a step of the job."""
        if self._followed is None and not graph:
            self._followed = number
        if number == self._followed:
            if self._strangers:
                self._strangers.clear()
            return True
        steps = self._strangers.get(number, 0) + 1
        self._strangers[number] = steps
        if steps < STRANGER_STEPS:
            return False
        self._followed = number
        self._strangers.clear()
        return True
