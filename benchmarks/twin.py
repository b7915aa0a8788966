"""How near the simulator comes to steps of this machine, when it knows what their parts take."""

from statistics import median

from benchmarks.result import figure
from meshwright.observe.twin.default_configs import (
    DEFAULT_LAYOUTS,
    NUM_SEQUENCES,
    SEQ_LEN,
    build_default_cpu_model,
)
from meshwright.observe.twin.layout_twin import (
    LayoutTwin,
    TwinWorkload,
    find_timing_hazards,
    run_layout_twins,
)
from meshwright.observe.twin.step_comparison import MAX_BUBBLE_POINTS, MAX_STEP_ERROR
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.spec.serialization import encode

NAME = "twin"
QUESTION = "Is a step of this machine what the simulator says it is?"

STEPS = 5
"""The middle one is taken: two may be disturbed."""


def measure(quick: bool) -> dict[str, object]:
    """Predict and run all layouts of `mw twin`; `quick` takes two and a tiny model."""
    from msgspec.structs import replace

    layouts = [
        replace(layout, precision="fp32") for layout in DEFAULT_LAYOUTS[: 2 if quick else None]
    ]
    asked = TwinWorkload(build_default_cpu_model(), SEQ_LEN, NUM_SEQUENCES, STEPS)
    if quick:
        tiny = build_decoder_model("tiny", layers=4, hidden=64, heads=4, ffn=128, vocab=256)
        asked = TwinWorkload(tiny, 32, 4, 3, num_rounds=2)
    remarks = find_timing_hazards(layouts)
    found = run_layout_twins(asked, layouts)
    errors = [abs(100 * twin.comparison.step_error) for twin in found]
    points = [abs(twin.comparison.bubble_points) for twin in found]
    same = sum(not twin.comparison.order_difference for twin in found)
    within = sum(twin.comparison.is_within_tolerance for twin in found)
    figures = [
        figure("layouts whose passes run in the predicted order", same, "", f">= {len(found)}"),
        figure(
            f"layouts within {MAX_BUBBLE_POINTS:g} points of bubble and {100 * MAX_STEP_ERROR:g} % "
            f"of step",
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
        f"{asked.num_sequences} × {asked.seq_len} tokens in fp32, the middle of {asked.num_steps} "
        f"steps; "
        "one thread a rank, gloo. "
    )
    return {"figures": figures, "peers": [], "notes": notes + " ".join(remarks)}


def _of(twin: LayoutTwin) -> list[dict[str, object]]:
    one, name = twin.comparison, _words(twin.layout)
    return [
        figure(f"{name}: bubble predicted", 100 * one.predicted.bubble_share, "%"),
        figure(f"{name}: bubble measured", 100 * one.measured.bubble_share, "%"),
        figure(f"{name}: step predicted", one.predicted.step_s, "s"),
        figure(f"{name}: step measured", one.measured.step_s, "s"),
        *(
            figure(f"{name}: {each.name} {side}", 1e3 * seconds, "ms")
            for each in one.pass_durations
            for side, seconds in (("predicted", each.predicted_s), ("measured", each.measured_s))
        ),
        *(
            []
            if twin.other_busy_cores is None
            else [figure(f"{name}: beside", twin.other_busy_cores, "cores")]
        ),
    ]


def _words(layout: Layout) -> str:
    usual = encode(Layout(precision="fp32"))
    return " ".join(
        str(value) if name == "schedule" else f"{name} {value}"
        for name, value in encode(layout).items()
        if value != usual.get(name)
    )
