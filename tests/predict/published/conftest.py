"""What several modules ask of the published rows."""

from pathlib import Path

import pytest

from meshwright.predict.published import Scored, read_rows, score

RUNS = Path(__file__).parents[3] / "validation" / "training" / "runs.json"


@pytest.fixture(scope="session")
def results() -> list[Scored]:
    """Return every row, predicted."""
    return score(read_rows(RUNS))
