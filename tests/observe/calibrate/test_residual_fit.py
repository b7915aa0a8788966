"""Residuals are kept only where they predict shapes that were left out better."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.calibrate.least_squares import soft_l1_loss
from meshwright.observe.calibrate.residual_fit import MIN_LOSS_GAIN, ResidualPoint, fit_residuals
from meshwright.predict.cost.residual_correction import ResidualCorrection


def places(number: int, seed: int) -> list[ResidualPoint]:
    draw = np.random.default_rng(seed)
    sizes = 2.0 ** draw.uniform(9, 15, size=(number, 3))
    return [
        ResidualPoint(("forward", "input_gradient")[at % 2], tuple(map(float, row.round())))
        for at, row in enumerate(sizes)
    ]


def smooth(place: ResidualPoint) -> float:
    return 0.15 * float(np.sin(np.log2(place.sizes[0]) + np.log2(place.sizes[1])))


def left_out(where: list[ResidualPoint], logs: np.ndarray) -> float:
    """Return the loss with each shape predicted from residuals of all others, one by one."""
    kept = fit_residuals("products", "bf16", where, logs).residuals
    assert kept is not None
    errors = []
    for at, place in enumerate(where):
        others = [one for number, one in enumerate(where) if number != at]
        found = fit_residuals("products", "bf16", others, np.delete(logs, at)).residuals
        factor = (
            1.0 if found is None else ResidualCorrection(found).factor(place.kind, *place.sizes)
        )
        errors.append(logs[at] - np.log(factor))
    return soft_l1_loss(errors)


@given(st.integers(0, 10_000), st.integers(8, 40), st.floats(0.0, 0.3), st.floats(0.0, 1.0))
def test_they_never_make_rows_left_out_worse(
    seed: int, number: int, noise: float, share: float
) -> None:
    where = places(number, seed)
    draw = np.random.default_rng(seed)
    logs = np.array([share * smooth(one) for one in where]) + noise * draw.normal(size=number)
    left = fit_residuals("products", "bf16", where, logs)
    if left.residuals is not None:
        assert left.loss_after <= (1 - MIN_LOSS_GAIN) * left.loss_before


def test_what_is_smooth_is_kept_and_holds_for_shapes_left_out_for_good() -> None:
    where = places(60, 1)
    logs = np.array([smooth(one) for one in where])
    assert left_out(where, logs) < 0.5 * soft_l1_loss(logs)


def test_pure_noise_is_left_alone() -> None:
    where = places(60, 2)
    logs = 0.05 * np.random.default_rng(3).normal(size=60)
    assert fit_residuals("products", "bf16", where, logs).residuals is None


def test_few_rows_are_left_alone() -> None:
    where = places(7, 1)
    assert fit_residuals("products", "bf16", where, np.full(7, 0.2)).residuals is None
