"""What several modules ask of the published rows."""

from pathlib import Path

import pytest

from meshwright.predict.validation.training import ScoredRun, read_runs, score_runs

RUNS = Path(__file__).parents[4] / "validation" / "training" / "runs.json"


@pytest.fixture(scope="session")
def results() -> list[ScoredRun]:
    """Return every row, predicted."""
    return score_runs(read_runs(RUNS))
