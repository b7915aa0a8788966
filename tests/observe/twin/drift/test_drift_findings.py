"""Changes told as findings, and ranks that are slow told from those that wait."""

from pathlib import Path

import pytest

from meshwright.observe.twin.drift.drift_detector import ExpectedStep, StepTimeChange, TermChange
from meshwright.observe.twin.drift.drift_findings import build_drift_finding
from meshwright.observe.twin.drift.run_steps import TrainSessionInfo
from meshwright.observe.twin.drift.slow_rank import find_slow_ranks
from meshwright.timeline import SpanKind, TimelineWriter

SLOW = StepTimeChange(
    "slower",
    120,
    110,
    1.0,
    1.2,
    (TermChange("gradients", 0.8, 0.95), TermChange("update", 0.2, 0.25)),
)
EXPECTED = ExpectedStep(1.0, 0.9, 1.1)


def test_a_slowdown_tells_its_terms_its_cost_and_a_remedy() -> None:
    found = build_drift_finding(SLOW, expected=EXPECTED, seen=("GPU 0's clock fell",), ended=300)
    assert found is not None
    assert (found.name, found.family, found.ranks) == ("step-drift", "drift", (0,))
    assert found.cost_basis.startswith("measured")
    assert "20.0 % slower: forward and backward" in found.title
    assert found.cost_ms_per_step == pytest.approx(200)
    assert found.gpu_share == pytest.approx(1 / 6)
    text = "\n".join(found.evidence)
    for said in ("from step 110 on", "over by step 300", "75 % of the change", "25 % of",
                 "leave the predicted band", "clock fell"):  # fmt: skip
        assert said in text
    assert "nvidia-smi" in found.remedy


def test_a_device_that_is_slow_at_everything_is_told_from_more_work() -> None:
    alike = "passes and update are slower alike: the device, rather than the work"
    found, more = (
        build_drift_finding(SLOW),
        build_drift_finding(SLOW._replace(terms=SLOW.terms[:1])),
    )
    assert found is not None
    assert more is not None
    assert alike in found.evidence
    assert alike not in more.evidence
    on_cores = build_drift_finding(SLOW, sessions=[TrainSessionInfo(0, "CPU", None, {})])
    assert on_cores is not None
    assert "nvidia-smi" not in on_cores.remedy


def test_what_is_back_or_faster_is_no_finding() -> None:
    assert build_drift_finding(SLOW._replace(kind="recovered")) is None
    assert build_drift_finding(SLOW._replace(kind="faster")) is None


@pytest.mark.parametrize(("after_s", "cost"), [(1.4, 400.0), (0.6, None)])
def test_a_pace_off_its_prediction_asks_for_a_calibration(
    after_s: float, cost: float | None
) -> None:
    change = StepTimeChange("off_prediction", 51, 4, 1.0, after_s)
    found = build_drift_finding(change, expected=EXPECTED)
    assert found is not None
    assert found.name == "off-prediction"
    assert found.cost_basis.startswith("estimated")
    assert found.cost_ms_per_step == (None if cost is None else pytest.approx(cost))
    assert "mw calibrate" in found.remedy


def test_a_change_with_a_session_tells_what_else_changed() -> None:
    rows = [TrainSessionInfo(after, "CPU", None, {"torch": torch}) for after, torch in ((0, "2.12"),
            (106, "2.13"))]  # fmt: skip
    found = build_drift_finding(SLOW._replace(starts_session=True), sessions=rows)
    assert found is not None
    assert any("after step 106: torch 2.12 → 2.13" in text for text in found.evidence)


def write_rank(folder: Path, rank: int, works_ns: list[int], step_ns: int) -> None:
    """Write steps of a rank that works and then waits for the others."""
    with TimelineWriter(folder, rank=rank) as writer:
        for number, work in enumerate(works_ns, 1):
            start = number * step_ns
            waits = step_ns - work
            writer.span(
                "wait for all_reduce dp",
                start + work,
                waits,
                kind=SpanKind.WAIT,
                lane="host",
                process="host",
            )
            writer.span(f"step {number}", start, step_ns, kind=SpanKind.HOST, lane="host",
                        process="host")  # fmt: skip


def test_the_rank_whose_own_work_grew_is_named(tmp_path: Path) -> None:
    ms = 1_000_000
    write_rank(tmp_path, 0, [80 * ms] * 20, 110 * ms)
    write_rank(tmp_path, 1, [80 * ms] * 10 + [100 * ms] * 10, 110 * ms)
    assert find_slow_ranks(tmp_path, 11, 0.02) == (1,)
    assert find_slow_ranks(tmp_path, 11, 0.2) == ()  # it explains too little
    assert find_slow_ranks(tmp_path, 18, 0.02) == ()  # too few steps since
    assert find_slow_ranks(tmp_path / "none", 11, 0.02) == ()
