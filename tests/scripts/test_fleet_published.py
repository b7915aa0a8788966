"""The page of published statistics of clusters."""

from meshwright.fleet.validation import StatisticComparison
from scripts.fleet_published import page

ROWS = [
    StatisticComparison(name="philly.philly_sia_csv.rows", published=100, ours=100.5,
    difference=0.005,
        agrees=True, method="rows", basis="trace"),
    StatisticComparison(name="reliability.x.y", published=2, ours=3, difference=0.5, agrees=False,
    reason="rounded"),
    StatisticComparison(name="philly.published_row.job_num", published=9, ours=8, difference=-0.1,
    basis="other",
        reason="a copy"),
    StatisticComparison(name="sia_published.a", published=1, reason="a simulation"),
]  # fmt: skip


def test_each_row_stands_in_its_table() -> None:
    text = page(ROWS)
    assert "**1 of them agree**" in text
    assert "| Philly | 1 | 0 | 0 | 1 | 0 | 0.50% |" in text
    assert "| `reliability.x.y` | 2 | 3 | +50.00% | rounded |" in text
    assert "| `philly.published_row.job_num` | 9 | 8 | -10.00% | a copy |" in text
    assert "| 1 | a simulation |" in text
    assert "| `philly.philly_sia_csv.rows` | 100 | 100.5 | +0.50% | rows |" in text
