"""How many training steps the closed form predicts per second, as a planner would ask it."""

import itertools
import statistics
import time

from meshwright.predict import TrainingRun, predict_step
from meshwright.predict.network.cost_curve import build_curve
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.layout import Recompute

NAME = "step_closed_form"
QUESTION = "How many training steps does one core predict per second in closed form?"

GPUS = 16_384


def works(count: int) -> list[JobSpec]:
    """List layouts of Llama 3.1 405B on 16,384 H100s."""
    model = catalog.get_model("llama3.1-405b")
    cluster = catalog.get_cluster("h100-superpod").with_gpus(GPUS)
    step = TrainingWorkload(tokens=10**12, sequence_length=8192, global_batch=4 * GPUS)
    recomputes: tuple[Recompute, ...] = ("none", "full")
    grid = itertools.product(
        (1, 2, 4, 8), (1, 2, 7, 14), (1, 2), (0, 1, 3), (1, 2, 4), recomputes, (1, 2)
    )
    found = [
        JobSpec(
            model=model,
            cluster=cluster,
            workload=step,
            layout=Layout(
                tp=tp, pp=pp, cp=cp, dp=GPUS // (tp * cp * spare * 2 ** (pp - 1).bit_length()),
                zero=zero, microbatch=micro, recompute=recompute, sequence_parallel=tp > 1,
            ),
        )
        for tp, pp, cp, zero, micro, recompute, spare in grid
    ]  # fmt: skip
    return found[:: max(1, len(found) // count)][:count]


def rate(asked: list[JobSpec]) -> float:
    """Return predictions per second over a list of works."""
    start = time.perf_counter()
    for work in asked:
        predict_step(TrainingRun(work))
    return len(asked) / (time.perf_counter() - start)


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    asked = works(100 if quick else 1000)
    build_curve.cache_clear()
    cold = rate(asked)
    warm = statistics.median(rate(asked) for _ in range(5))
    return {
        "figures": [
            {
                "name": "steps predicted, shapes and groups seen before",
                "value": warm,
                "unit": "1/s",
                "target": ">= 3_000",
            },
            {
                "name": "steps predicted, each for the first time",
                "value": cold,
                "unit": "1/s",
            },
        ],
        "peers": [],
        "notes": f"One core, {len(asked)} layouts of Llama 3.1 405B on up to 16,384 H100s. A "
        "search meets most products and groups many times, so the first figure is its steady pace.",
    }
