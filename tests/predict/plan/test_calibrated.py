"""Searches stay exact where measured shapes correct the curves, however wildly."""

from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.cost import Calibration, list_measured_devices
from meshwright.predict.cost.curves import CurveResiduals, ResidualFamily
from meshwright.predict.plan import find_plans
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.test_exhaustive import FAMILIES, planned
from tests.predict.plan.tiny import asked

PARTS = ("forward", "input_gradient", "weight_gradient")


def wild(gpu: str, random: Random) -> Calibration:
    """Return corrections of up to several times, up and down, close to each other."""

    def left(
        family: ResidualFamily, name: str, kinds: tuple[str, ...], sides: int
    ) -> CurveResiduals:
        points = [
            " ".join(
                [
                    random.choice(kinds),
                    *(str(round(2 ** random.uniform(4, 13))) for _ in range(sides)),
                    f"{random.gauss(0, 0.4):.3f}",
                ]
            )
            for _ in range(80)
        ]
        return CurveResiduals(
            family=family, name=name, reach=1.5, likeness=0.5, points=tuple(points)
        )

    return Calibration(
        gpu=gpu,
        source="drawn",
        grouped=list_measured_devices()["h100-80g-sxm"].products[0],
        residuals=(
            left("products", "bf16", PARTS, 3),
            left("grouped", "bf16", PARTS, 4),
            left("attention", "forward", ("causal",), 5),
            left("attention", "backward", ("causal",), 5),
        ),
    )


@pytest.mark.parametrize("seed", [2, 158, 641])
def test_the_fastest_are_those_of_all_layouts(seed: int) -> None:
    question = question_of(Random(seed), 1000)
    question = replace(question, calibration=wild(question.cluster.gpu.name, Random(seed)))
    wanted = [one.step.step_s for one in Every(question).fastest(FAMILIES)]
    assert planned(question) == pytest.approx(wanted, rel=1e-9)


def test_a_plan_is_made_with_the_calibration_that_was_given() -> None:
    plain = asked()
    curves = tuple(
        replace(curve, efficiency=curve.efficiency / 2)
        for curve in list_measured_devices()["h100-80g-sxm"].products
    )
    slow = Calibration(gpu=plain.cluster.gpu.name, source="slow", products=curves)
    found = find_plans(replace(plain, calibration=slow), most=1, execute=False)
    assert found.best.step.step_s > 1.2 * find_plans(plain, most=1, execute=False).best.step.step_s
