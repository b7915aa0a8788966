"""Whether layouts fit, decided for every recompute option and every number of layers at once.

The formulas are those of `predict.memory`, on arrays: a row for every option, a column for every
number of layers that it covers. What a rank needs falls as an option covers more layers, so the
first column that fits is the fewest.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.predict.memory import LayerBytes, Resident, activation_bytes, room_bytes
from meshwright.predict.plan.holdings import Holding, Stages
from meshwright.predict.run import Run

Array = npt.NDArray[Any]


class Sizes:
    """Bytes per token of every kind of layer under every option."""

    def __init__(self, options: list[dict[str, LayerBytes]]) -> None:
        self.layers = options[0]
        self.names = list(options[0])
        self.whole = np.array([layer.whole for layer in options[0].values()])
        self.working = np.array([layer.working for layer in options[0].values()])
        self.saved = self.whole - np.array(
            [[layer.kept for layer in option.values()] for option in options]
        )
        """What a covered layer keeps less."""


class Needs:
    """What the activations of one kind of rank need."""

    def __init__(self, run: Run, sizes: Sizes, holding: Holding, deepest: int) -> None:
        rows = holding.covered
        counts = [[row[name] for name in sizes.names] for row in rows]
        # Where another chunk of the pipeline is longer, this one is covered whole by then.
        counts += [counts[-1]] * (deepest + 1 - len(counts))
        covered = np.array(counts)
        every = covered[-1]
        # Activations of the first layers of each chunk go to the host, if any do.
        gone = covered[min(run.layout.offload_layers or 0, deepest)]
        left = np.maximum(covered - gone, 0)
        kept = (every - gone) @ sizes.whole - sizes.saved @ left.T
        backward = np.where(covered > 0, 1.0, -np.inf)
        again = (sizes.saved + sizes.working)[:, None, :] * backward
        kind = np.where(every - covered > 0, sizes.working, -np.inf).max(axis=1)
        working = np.maximum(again.max(axis=2), kind)
        both = activation_bytes(run, sizes.layers, holding.rank, holding.flying, (kept, working))
        self.kept, self.working = np.rint(both[0]), np.rint(both[1])
        self._run = run

    def fits(self, held: Resident) -> Array:
        """Tell of every option and number of layers whether it fits beside what a rank holds."""
        room = room_bytes(self._run, held.runtime)
        working = np.maximum(self.working, held.logits)
        moment = self.kept + working
        if not (held.update or held.releases):
            return moment <= room - held.states.total - held.buffers  # type: ignore[no-any-return]
        # As `Resident.peak`: gradients and the update take the place of activations.
        moment = moment + held.buffers
        tensors = held.states.total + moment
        if held.releases:
            # All but what the last backward works with.
            freed = moment - self.working
            tensors = tensors - np.minimum(held.states.gradients, freed)
        return tensors + np.maximum(0, held.update - moment) <= room  # type: ignore[no-any-return]


def needs_of(run: Run, sizes: Sizes, stages: Stages) -> tuple[Needs, ...]:
    """Return the needs of each kind of rank."""
    return tuple(Needs(run, sizes, one, stages.deepest) for one in stages.holdings)


def fewest_layers(
    needs: tuple[Needs, ...], residents: tuple[Resident, ...], nothing: int | None
) -> list[int | None]:
    """Return of every option on how few layers of each chunk it has to run; None where it cannot.

    `nothing` is the row of the option that computes nothing again.
    """
    return fewest_of(fitting(needs, residents), nothing)


def fitting(needs: tuple[Needs, ...], residents: tuple[Resident, ...]) -> Array:
    """Tell of every option and number of layers whether it fits on all ranks."""
    fits = needs[0].fits(residents[0])
    for one, held in zip(needs[1:], residents[1:], strict=True):
        fits = fits & one.fits(held)
    return fits


def fewest_of(fits: Array, nothing: int | None) -> list[int | None]:
    """Return of every option the fewest layers that fit."""
    first = fits[:, 1:].argmax(axis=1) + 1
    possible = fits[:, 1:].any(axis=1)
    found: list[int | None] = [
        number if fit else None
        for number, fit in zip(first.tolist(), np.atleast_1d(possible).tolist(), strict=True)
    ]
    if nothing is not None:
        found[nothing] = 0 if fits[nothing, 0] else None
    return found
