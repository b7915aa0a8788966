"""How near the simulator comes to steps of this machine, when it knows what their parts take."""

from statistics import median

from benchmarks.result import figure
from meshwright.observe.twin.compare import BUBBLE_POINTS, STEP_SHARE
from meshwright.observe.twin.layouts import LENGTH, SEQUENCES, STANDARD, small_model
from meshwright.observe.twin.twins import Asked, Twin, doubts, twins
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder
from meshwright.spec.read import plain

NAME = "twin"
QUESTION = "Is a step of this machine what the simulator says it is?"

STEPS = 5
"""The middle one is taken: two may be disturbed."""


def measure(quick: bool) -> dict[str, object]:
    """Predict and run all layouts of `mw twin`; `quick` takes two and a tiny model."""
    from msgspec.structs import replace

    layouts = [replace(layout, precision="fp32") for layout in STANDARD[: 2 if quick else None]]
    asked = Asked(small_model(), LENGTH, SEQUENCES, STEPS)
    if quick:
        tiny = decoder("tiny", layers=4, hidden=64, heads=4, ffn=128, vocab=256)
        asked = Asked(tiny, 32, 4, 3, rounds=2)
    remarks = doubts(layouts)
    found = twins(asked, layouts)
    errors = [abs(100 * twin.comparison.step_error) for twin in found]
    points = [abs(twin.comparison.bubble_points) for twin in found]
    same = sum(not twin.comparison.difference for twin in found)
    within = sum(twin.comparison.agrees for twin in found)
    figures = [
        figure("layouts whose passes run in the predicted order", same, "", f">= {len(found)}"),
        figure(
            f"layouts within {BUBBLE_POINTS:g} points of bubble and {100 * STEP_SHARE:g} % of step",
            within, "", "" if quick else ">= 8",
        ),
        figure("step, median error", median(errors), "%"),
        figure("step, largest error", max(errors), "%"),
        figure("bubble, median error", median(points), "points"),
        figure("bubble, largest error", max(points), "points"),
        *(one for twin in found for one in _of(twin)),
    ]  # fmt: skip
    notes = (
        f"{asked.model.name}: {asked.model.layers} layers, {asked.model.hidden} wide, "
        f"{asked.sequences} × {asked.length} tokens in fp32, the middle of {asked.steps} steps; "
        "one thread a rank, gloo. "
    )
    return {"figures": figures, "peers": [], "notes": notes + " ".join(remarks)}


def _of(twin: Twin) -> list[dict[str, object]]:
    one, name = twin.comparison, _words(twin.layout)
    return [
        figure(f"{name}: bubble predicted", 100 * one.predicted.bubble, "%"),
        figure(f"{name}: bubble measured", 100 * one.measured.bubble, "%"),
        figure(f"{name}: step predicted", one.predicted.step_s, "s"),
        figure(f"{name}: step measured", one.measured.step_s, "s"),
        *(
            figure(f"{name}: {each.name} {side}", 1e3 * seconds, "ms")
            for each in one.lengths
            for side, seconds in (("predicted", each.predicted_s), ("measured", each.measured_s))
        ),
        *([] if twin.beside is None else [figure(f"{name}: beside", twin.beside, "cores")]),
    ]


def _words(layout: Layout) -> str:
    usual = plain(Layout(precision="fp32"))
    return " ".join(
        str(value) if name == "schedule" else f"{name} {value}"
        for name, value in plain(layout).items()
        if value != usual.get(name)
    )
