"""Every schedule that the simulator can run is recognised in its timeline; bubbles are measured."""

import numpy as np
import pytest

from meshwright.observe.analyze.pipeline import pipeline
from meshwright.predict.simulate import simulate_step
from meshwright.spec.layout import ScheduleKind
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import steady_job
from tests.predict.runs import KINDS, run_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "batch"), [(2, 6), (4, 8), (4, 16), (8, 24)])
def test_a_simulated_schedule_is_recognised(kind: ScheduleKind, pp: int, batch: int) -> None:
    found = pipeline(simulate_step(run_of(kind, batch=batch, pp=pp)).timeline())
    assert found is not None
    assert found.schedule == kind
    assert found.agreement == 1.0
    assert found.microbatches == batch


def test_noise_does_not_hide_the_schedule() -> None:
    step = simulate_step(run_of("1f1b"), jitter_cv=0.2, seed=3)
    found = pipeline(step.timeline())
    assert found is not None
    assert found.schedule == "1f1b"


def test_the_bubble_of_gpipe_is_the_one_of_the_formula() -> None:
    # p - 1 of m + p - 1 slots are empty (Huang et al. 2019); stages are equal but for the ends.
    found = pipeline(simulate_step(run_of("gpipe", batch=8, pp=4)).timeline())
    assert found is not None
    assert found.bubble_share == pytest.approx(3 / 11, rel=0.02)
    assert [one.stage for one in found.ranks] == [0, 1, 2, 3]
    warmups = np.diff([one.warmup_ns for one in found.ranks])
    assert np.all(warmups > 0)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_messages_alone_tell_the_schedule(kind: ScheduleKind) -> None:
    step = simulate_step(run_of(kind, batch=8, pp=4))
    found = pipeline(step.timeline().select(kinds=["communication"]))
    assert found is not None
    assert found.schedule == kind


def test_a_job_without_stages_has_no_pipeline() -> None:
    assert pipeline(steady_job()) is None
    assert pipeline(Timeline.empty()) is None
