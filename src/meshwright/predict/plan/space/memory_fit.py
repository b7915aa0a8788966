"""Whether layouts fit, decided for every recompute option and every number of layers at once.

The formulas are those of `predict.memory`, on arrays: a row for every option, a column for every
number of layers that it covers. What a rank needs falls as an option covers more layers, so the
first column that fits is the fewest.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.predict.memory.rank_memory import (
    LayerBytes,
    ResidentBytes,
    activation_budget_bytes,
    activation_bytes,
)
from meshwright.predict.plan.space.stage_contents import RankContents, StageContents
from meshwright.predict.training_run.training_run import TrainingRun

Array = npt.NDArray[Any]


class LayerSizes:
    """Bytes per token of every kind of layer under every option."""

    def __init__(self, options: list[dict[str, LayerBytes]]) -> None:
        self.layers = options[0]
        self.names = list(options[0])
        self.without_recompute = np.array(
            [layer.without_recompute for layer in options[0].values()]
        )
        self.working = np.array([layer.backward_working for layer in options[0].values()])
        self.saved = self.without_recompute - np.array(
            [[layer.with_recompute for layer in option.values()] for option in options]
        )
        """What a covered layer keeps less."""


class ActivationNeeds:
    """What the activations of one kind of rank need."""

    def __init__(
        self, run: TrainingRun, sizes: LayerSizes, holding: RankContents, deepest: int
    ) -> None:
        rows = holding.recomputed_layers
        counts = [[row[name] for name in sizes.names] for row in rows]
        # Where another chunk of the pipeline is longer, this one is covered whole by then.
        counts += [counts[-1]] * (deepest + 1 - len(counts))
        covered = np.array(counts)
        every = covered[-1]
        # Activations of the first layers of each chunk go to the host, if any do.
        gone = covered[min(run.layout.offload_layers or 0, deepest)]
        left = np.maximum(covered - gone, 0)
        kept = (every - gone) @ sizes.without_recompute - sizes.saved @ left.T
        backward = np.where(covered > 0, 1.0, -np.inf)
        again = (sizes.saved + sizes.working)[:, None, :] * backward
        kind = np.where(every - covered > 0, sizes.working, -np.inf).max(axis=1)
        working = np.maximum(again.max(axis=2), kind)
        both = activation_bytes(
            run, sizes.layers, holding.stage_rank, holding.in_flight, (kept, working)
        )
        self.kept_bytes, self.working_bytes = np.rint(both[0]), np.rint(both[1])
        self._run = run

    def fits_with(self, held: ResidentBytes) -> Array:
        """Tell of every option and number of layers whether it fits beside what a rank holds."""
        room = activation_budget_bytes(self._run, held.runtime_bytes)
        working = np.maximum(self.working_bytes, held.logits_bytes)
        moment = self.kept_bytes + working
        if not (held.update_bytes or held.gradients_replace_activations):
            return moment <= room - held.states.total - held.buffers_bytes  # type: ignore[no-any-return]
        # As `ResidentBytes.peak`: gradients and the update take the place of activations.
        moment = moment + held.buffers_bytes
        tensors = held.states.total + moment
        if held.gradients_replace_activations:
            # All but what the last backward works with.
            freed = moment - self.working_bytes
            tensors = tensors - np.minimum(held.states.gradients, freed)
        return tensors + np.maximum(0, held.update_bytes - moment) <= room  # type: ignore[no-any-return]


def count_needs(
    run: TrainingRun, sizes: LayerSizes, stages: StageContents
) -> tuple[ActivationNeeds, ...]:
    """Return the needs of each kind of rank."""
    return tuple(
        ActivationNeeds(run, sizes, one, stages.max_chunk_layers) for one in stages.rank_contents
    )


def find_min_recompute_layers(
    needs: tuple[ActivationNeeds, ...], residents: tuple[ResidentBytes, ...], nothing: int | None
) -> list[int | None]:
    """Return of every option on how few layers of each chunk it has to run; None where it cannot.

    `nothing` is the row of the option that computes nothing again.
    """
    return first_fitting_layers(find_fitting_options(needs, residents), nothing)


def find_fitting_options(
    needs: tuple[ActivationNeeds, ...], residents: tuple[ResidentBytes, ...]
) -> Array:
    """Tell of every option and number of layers whether it fits on all ranks."""
    fits = needs[0].fits_with(residents[0])
    for one, held in zip(needs[1:], residents[1:], strict=True):
        fits = fits & one.fits_with(held)
    return fits


def first_fitting_layers(fits: Array, nothing: int | None) -> list[int | None]:
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
