"""What a corpus is like, in figures."""

import numpy as np
import pytest

from meshwright.run.train.data.document_split import select_split
from meshwright.run.train.data.packing.best_fit_packing import plan_in_memory
from meshwright.run.train.data.packing.corpus_stats import (
    compute_packing_stats,
    fit_length_distribution,
    sample_document_lengths,
    summarize_lengths,
)
from tests.run.train.data.conftest import Open


def test_lengths_are_summarised(corpus: Open) -> None:
    found = corpus([[1] * length for length in range(1, 101)])
    spread = summarize_lengths(sample_document_lengths(found))
    assert (spread.mean, spread.min, spread.max) == (50.5, 1, 100)
    assert (spread.p50, spread.p90, spread.p99) == (50, 90, 99)
    assert summarize_lengths(np.empty(0, np.int64)).max == 0


def test_lengths_become_a_workload() -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(300), 0.8, 20_000).astype(np.int64)
    found = fit_length_distribution(drawn)
    assert found is not None
    assert found.median == pytest.approx(300, rel=0.05)
    assert found.sigma == pytest.approx(0.8, rel=0.05)
    assert fit_length_distribution(np.array([5, 5])) is None


def test_fills_count_what_sequences_hold(corpus: Open) -> None:
    found = corpus([[1] * length for length in (10, 6, 4, 3, 25)])
    none, concat, pack = compute_packing_stats(sample_document_lengths(found), 5, 10)
    assert (none.sequences, none.filled_fraction, none.truncated_fraction) == (
        5,
        33 / 50,
        1 - 33 / 48,
    )
    assert (concat.sequences, concat.filled_fraction) == (4, 1.0)
    assert pack.sequences == len(plan_in_memory(select_split(found), 10).sequence_offsets) - 1 == 5
    assert (pack.truncated_fraction, pack.split_fraction) == (0.0, 0.2)
    assert pack.filled_fraction == 48 / 50
