"""What a corpus is like, in figures."""

import numpy as np
import pytest

from meshwright.run.train.data.figures import as_workload, document_lengths, fills, summarise
from meshwright.run.train.data.packing import plan_in_memory
from meshwright.run.train.data.selection import select
from tests.run.train.data.conftest import Open


def test_lengths_are_summarised(corpus: Open) -> None:
    found = corpus([[1] * length for length in range(1, 101)])
    spread = summarise(document_lengths(found))
    assert (spread.mean, spread.shortest, spread.longest) == (50.5, 1, 100)
    assert (spread.p50, spread.p90, spread.p99) == (50, 90, 99)
    assert summarise(np.empty(0, np.int64)).longest == 0


def test_lengths_become_a_workload() -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(300), 0.8, 20_000).astype(np.int64)
    found = as_workload(drawn)
    assert found is not None
    assert found.median == pytest.approx(300, rel=0.05)
    assert found.sigma == pytest.approx(0.8, rel=0.05)
    assert as_workload(np.array([5, 5])) is None


def test_fills_count_what_sequences_hold(corpus: Open) -> None:
    found = corpus([[1] * length for length in (10, 6, 4, 3, 25)])
    none, concat, pack = fills(document_lengths(found), 5, 10)
    assert (none.sequences, none.filled_share, none.cut_share) == (5, 33 / 50, 1 - 33 / 48)
    assert (concat.sequences, concat.filled_share) == (4, 1.0)
    assert pack.sequences == len(plan_in_memory(select(found), 10).firsts) - 1 == 5
    assert (pack.cut_share, pack.split_share) == (0.0, 0.2)
    assert pack.filled_share == 48 / 50
