"""The examples of the guide run."""

import doctest
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "guide" / "collective-synthesis.md"


def test_examples_of_the_guide_run() -> None:
    failed, tried = doctest.testfile(str(GUIDE), module_relative=False)
    assert tried > 10
    assert failed == 0
