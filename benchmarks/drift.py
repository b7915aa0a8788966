"""How soon a run that has become slower is told, and how often one that has not.

Three kinds of steps are judged, as `mw twin --monitor` judges them. Noise from a generator, of many
kinds, for the rate of false alarms over more steps than anybody records. Steps of real runs that
`drift_record` wrote into `series/`: the clean stretch, for false alarms; the same with a share
added to one term from some step on, at many places; and the stretches in which the run itself was
made slower.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.result import figure
from meshwright.observe.twin.drift.drift_detector import (
    DriftDetector,
    DriftTerm,
    StepSample,
    StepTimeChange,
)

NAME = "drift"
QUESTION = "How soon is a slower run told, and how often is a clean one?"

SERIES = Path(__file__).resolve().parent / "series"
SHARES = (0.05, 0.20)
TERMS: tuple[DriftTerm, ...] = ("gradients", "update", "data")
FALSE_ALARMS = "<= 0.1"
"""In 1,000 steps; what the limits are made for is ten times fewer, of noise as assumed."""
FOLLOWED = 300
"""Steps after a slowdown by which it has to be told."""
PLACES = 12
Floats = np.typing.NDArray[np.float64]


def _linked(drawn: Floats, memory: float) -> Floats:
    """Let every value remember the one before, the spread being the same."""
    found, held, new = np.empty_like(drawn), 0.0, (1 - memory**2) ** 0.5
    for at, value in enumerate(drawn.tolist()):
        held = found[at] = memory * held + new * value
    return found


def _heavy(random: np.random.Generator, count: int) -> Floats:
    """Draw values of spread 1 with heavy tails: Student's t with three degrees of freedom."""
    return random.standard_t(3, count) / 3**0.5


NOISE: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal, 0.3 %": lambda random, n: 0.003 * random.standard_normal(n),
    "normal, 10 %": lambda random, n: 0.1 * random.standard_normal(n),
    "heavy tails, 2 %": lambda random, n: 0.02 * _heavy(random, n),
    "heavy tails, 10 %": lambda random, n: 0.1 * _heavy(random, n),
    "heavy tails, 2 %, correlated 0.8": lambda random, n: _linked(0.02 * _heavy(random, n), 0.8),
    "normal, 5 %, correlated 0.5": lambda random, n: _linked(0.05 * random.standard_normal(n), 0.5),
    "normal, 2 %, correlated 0.95": lambda random, n: _linked(
        0.02 * random.standard_normal(n), 0.95
    ),
    "2 %, one in 20 several times as long": lambda random, n: (
        0.02 * _heavy(random, n) + (random.random(n) < 0.05) * random.exponential(1.0, n)
    ),
    "1 %, every 50th three times as long": lambda random, n: (
        0.01 * random.standard_normal(n) + (np.arange(n) % 50 == 0) * np.log(3.0)
    ),
}


def _wandering(random: np.random.Generator, count: int) -> Floats:
    """Draw noise of spread 1 whose power falls as 1/f: it moves at every scale of time."""
    rates = np.fft.rfftfreq(count)
    rates[0] = rates[1]
    drawn = random.standard_normal(rates.size) + 1j * random.standard_normal(rates.size)
    found = np.fft.irfft(drawn / np.sqrt(rates), count)
    return np.asarray(found / found.std())


def _two_paces(random: np.random.Generator, count: int, leave: float) -> Floats:
    """Draw noughts and ones that now and then change places."""
    return (np.cumsum(random.random(count) < leave) % 2).astype(np.float64)


def _bursts(random: np.random.Generator, count: int, length: int) -> Floats:
    """Draw noise of 1 %; every 300 steps some steps in a row take half as long again."""
    slow = (np.arange(count) % 300) < length
    return np.asarray(0.01 * random.standard_normal(count) + slow * np.log(1.5))


OTHER: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "gamma, 5 %": lambda random, n: np.log(random.gamma(400, 1 / 400, n)),
    "very heavy tails, 3 %": lambda random, n: 0.03 * random.standard_t(2, n),
    "two paces 5 % apart, 5 steps each": lambda random, n: (
        0.05 * _two_paces(random, n, 0.2) + 0.005 * random.standard_normal(n)
    ),
    "two paces 10 % apart, 20 steps each": lambda random, n: (
        0.10 * _two_paces(random, n, 0.05) + 0.005 * random.standard_normal(n)
    ),
    "wandering, 1 %": lambda random, n: 0.01 * _wandering(random, n),
    "wandering, 2 %": lambda random, n: 0.02 * _wandering(random, n),
    "4 steps in 300 half as long again": lambda random, n: _bursts(random, n, 4),
    "10 steps in 300 half as long again": lambda random, n: _bursts(random, n, 10),
}
"""Kinds that were tried after the test was made; but for the four steps in a row, which it told
then, it is as it was."""
NO_PROMISE = (
    "two paces 10 % apart, 20 steps each",
    "wandering, 2 %",
    "10 steps in 300 half as long again",
)
"""Steps that do become slower for longer than it takes to tell, again and again."""


class Recorded(NamedTuple):
    """A run that was recorded."""

    name: str
    device: str
    steps: list[StepSample]
    stretches: list[dict[str, Any]]

    def steps_of(self, first: int, last: int) -> list[StepSample]:
        """Return the steps of some numbers."""
        start = self.steps[0].number
        return self.steps[first - start : last - start + 1]


def measure(quick: bool) -> dict[str, object]:
    """Judge noise and recorded runs; `quick` takes little of each."""
    figures = [*_simulated(2 if quick else 50), *_simulated_slower(2 if quick else 12)]
    recorded = [read(path) for path in sorted(SERIES.glob("drift-*.json"))]
    for run in recorded:
        figures += _clean(run)
        figures += _added(run, 2 if quick else PLACES)
        figures += _planted(run)
    devices = "; ".join(f"{run.name}: {run.device}" for run in recorded) or "none was recorded"
    notes = (
        "Delays are in steps, from the first slower step to the one after which it is told; steps "
        "shorter than 0.1 s are judged in blocks of so long. Simulated: 50 runs of 2,000 steps of "
        f"1 s for each kind of noise. Recorded: {devices}. Added: {PLACES} places in the second "
        f"half of the clean stretch, {FOLLOWED} steps followed. Planted: the run itself was made "
        "slower, by benchmarks/drift_record.py."
    )
    return {"figures": figures, "peers": [], "notes": notes}


def read(path: Path) -> Recorded:
    """Read what `drift_record` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    steps = []
    names = ("step_us", "between_us", "gradients_us", "update_us", "data_wait_us")
    for at, row in enumerate(zip(*(data[name] for name in names), strict=True)):
        step_s, between_s, gradients_s, update_s, wait_s = (1e-6 * value for value in row)
        data_s = min(between_s, wait_s)
        terms: dict[DriftTerm, float] = {"data": data_s, "between": between_s - data_s,
                                    "gradients": gradients_s, "update": update_s}  # fmt: skip
        steps.append(StepSample(data["first"] + at, step_s, terms, at == 0))
    name = path.stem.removeprefix("drift-")
    return Recorded(name, f"{data['device']}, {data['model']}", steps, data["stretches"])


def told(steps: list[StepSample]) -> list[StepTimeChange]:
    """Return what a detector says of steps."""
    detector = DriftDetector()
    return [change for step in steps if (change := detector.add(step)) is not None]


def _alarms(changes: list[StepTimeChange]) -> int:
    return sum(change.kind == "slower" for change in changes)


def _simulated(runs: int, steps: int = 2000) -> Iterator[dict[str, object]]:
    random = np.random.default_rng(0)
    for name, draw in (NOISE | OTHER).items():
        alarms = sum(
            _alarms(told([StepSample(at, time) for at, time in enumerate(np.exp(drawn).tolist())]))
            for drawn in (draw(random, steps) for _ in range(runs))
        )
        rate = 1000 * alarms / (runs * steps)
        target = "" if name in NO_PROMISE else FALSE_ALARMS
        yield figure(f"simulated, {name}: false alarms", rate, "/1,000 steps", target)


def _simulated_slower(runs: int, before: int = 600) -> Iterator[dict[str, object]]:
    random = np.random.default_rng(1)
    for name, draw in NOISE.items():
        for share in SHARES:
            found = []
            for _ in range(runs):
                times = np.exp(draw(random, before + FOLLOWED))
                times[before:] *= 1 + share
                first = _first([StepSample(at, time) for at, time in enumerate(times.tolist())])
                found += [] if first is None else [first.step - before + 1]
            title = f"simulated, {name}, {100 * share:.0f} % slower"
            yield figure(f"{title}: told within {FOLLOWED} steps", 100 * len(found) / runs, "%")
            if found:
                yield figure(f"{title}: delay, median", median(found), "steps")


def _clean(run: Recorded) -> list[dict[str, object]]:
    stretch = run.stretches[0]
    steps = run.steps_of(stretch["first"], stretch["last"])
    rate = 1000 * _alarms(told(steps)) / len(steps)
    times = np.array([step.step_s for step in steps[3:]])
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return [
        figure(f"{run.name}, clean: step", 1e3 * float(middle), "ms"),
        figure(f"{run.name}, clean: half of the quartiles' distance",
               50 * float((high - low) / middle), "%"),
        figure(f"{run.name}, clean: steps", len(steps), ""),
        figure(f"{run.name}, clean: false alarms", rate, "/1,000 steps", FALSE_ALARMS),
    ]  # fmt: skip


def _added(run: Recorded, places: int) -> Iterator[dict[str, object]]:
    """Add a share of the usual step to one term from a step on, at many places."""
    stretch = run.stretches[0]
    clean = run.steps_of(stretch["first"], stretch["last"])
    usual_s = median(step.step_s for step in clean)
    for share in SHARES:
        found, right, tried = [], 0, 0
        for term in TERMS:
            for place in np.linspace(len(clean) // 2, len(clean) - FOLLOWED - 1, places).astype(
                int
            ):
                tried += 1
                first = _first(_slowed(clean, int(place), term, share * usual_s))
                if first is None:
                    continue
                found.append(first.step - clean[place].number + 1)
                right += first.largest_change is not None and first.largest_change.term == term
        yield from _delays(f"{run.name}, {100 * share:.0f} % added", found, right, tried)


def _places(steps: int, count: int) -> list[int]:
    """Return where slowdowns begin: in the second half, with room to follow them."""
    found: list[int] = np.linspace(steps // 2, steps - FOLLOWED - 1, count).astype(int).tolist()
    return found


def _slowed(
    steps: list[StepSample], place: int, term: DriftTerm, extra_s: float
) -> list[StepSample]:
    slow = [
        step._replace(
            step_s=step.step_s + extra_s, terms={**step.terms, term: step.terms[term] + extra_s}
        )
        for step in steps[place : place + FOLLOWED]
    ]
    return [*steps[:place], *slow]


def _first(steps: list[StepSample], after: int | None = None) -> StepTimeChange | None:
    """Return the first slowdown that is told of the last `FOLLOWED` steps."""
    begin = steps[-FOLLOWED].number if after is None else after
    return next((one for one in told(steps) if one.kind == "slower" and one.step >= begin), None)


def _delays(name: str, found: list[int], right: int, tried: int) -> Iterator[dict[str, object]]:
    yield figure(f"{name}: told", 100 * len(found) / tried, "%")
    if found:
        yield figure(f"{name}: delay, median", median(found), "steps")
        yield figure(f"{name}: delay, longest", max(found), "steps")
        yield figure(f"{name}: the right term named", 100 * right / len(found), "%")


def _planted(run: Recorded) -> Iterator[dict[str, object]]:
    """Judge each stretch in which the run was slower, after the clean steps that go before it."""
    before, clean = list[StepSample](), run.stretches[0]
    usual = run.steps_of(clean["first"], clean["last"])
    for stretch in run.stretches[1:]:
        steps = run.steps_of(stretch["first"], stretch["last"])
        if not stretch["fault"]:
            before = steps
            continue
        rise = median(step.step_s for step in steps) / median(step.step_s for step in usual) - 1
        # The clean steps last before it, after those of the long stretch, which say what is usual.
        given = [*usual, *before, *steps]
        first = _first(given, after=stretch["first"])
        share = f", {100 * stretch['share']:.0f} %" if stretch["share"] else ""
        name = f"{run.name}, planted, {stretch['fault']}{share}"
        yield figure(f"{name}: measured rise", 100 * rise, "%")
        if first is None:
            yield figure(f"{name}: told", 0, "")
            continue
        yield figure(f"{name}: delay", first.step - stretch["first"] + 1, "steps")
        named = (
            first.largest_change is not None
            and first.largest_change.term == stretch["fault"].split(" ")[0]
        )
        if stretch["fault"] in TERMS:
            yield figure(f"{name}: the right term named", float(named), "")
