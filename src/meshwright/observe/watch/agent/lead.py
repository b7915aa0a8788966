"""Which of a job's optimizers ends a step."""

STRANGER_STEPS = 64
"""So many steps of another optimizer, with none of the lead's between, and the lead is gone."""


class Lead:
    """Told each time an optimizer has stepped, it says whether that ends a step of the job.

    A job may have several optimizers (one for matrices and one for the rest, one per parameter
    that steps within backward): the first to step is followed, and the others are parts of its
    steps. Where it is seen no more, as in another phase of training, the next one is followed.
    """

    def __init__(self) -> None:
        self._followed: int | None = None
        self._strangers: dict[int, int] = {}

    def ends_step(self, optimizer: int) -> bool:
        """Tell whether the step of this optimizer, known by its number, ends one of the job."""
        if self._followed is None:
            self._followed = optimizer
        if optimizer == self._followed:
            if self._strangers:
                self._strangers.clear()
            return True
        steps = self._strangers.get(optimizer, 0) + 1
        self._strangers[optimizer] = steps
        if steps < STRANGER_STEPS:
            return False
        self._followed = optimizer
        self._strangers.clear()
        return True
