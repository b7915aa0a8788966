"""One small corpus for all tests of the loop."""

from pathlib import Path

import pytest

from tests.run.train.tiny import write_corpus


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens, by bytes."""
    return write_corpus(tmp_path_factory.mktemp("tiny"))
