"""Reading a source: rows are kept before the cursor moves, and a failure loses none of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.fleet.ingestion import ingest
from meshwright.fleet.sources.source import RowBatch, make_rows
from meshwright.fleet.store import FleetStore, PutResult

pytest.importorskip("duckdb")


class Numbers:
    """A source of ten samples that fails before one of them, once."""

    name = "numbers"

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.began = fails_at, -1

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        self.began = int(cursor or 0)
        for number in range(self.began, 10):
            if number == self.fails_at:
                raise ConnectionError("gone")
            columns = {
                "cluster": ["east"], "node": ["n1"], "gpu": [0], "time_s": [30.0 * number],
                "gpu_util": [0.5],
            }  # fmt: skip
            notes = ("odd",) if number % 2 else ()
            yield RowBatch("gpu_samples", make_rows("gpu_samples", columns), str(number + 1), notes)


@pytest.fixture
def store(tmp_path: Path) -> FleetStore:
    return FleetStore(tmp_path / "store", create=True)


def test_a_source_is_read_on_from_where_it_was_left(store: FleetStore) -> None:
    done = ingest(store, Numbers())
    assert done.tables == {"gpu_samples": PutResult(new=10)}
    assert done.notes == {"odd": 5}
    more = Numbers()
    assert ingest(store, more).total == PutResult()
    assert more.began == 10


def test_again_reads_all_of_it_and_changes_nothing(store: FleetStore) -> None:
    ingest(store, Numbers())
    assert ingest(store, Numbers(), from_start=True).total == PutResult(duplicates=10)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_what_came_before_a_failure_is_kept(store: FleetStore, rows_at_once: int) -> None:
    with pytest.raises(ConnectionError):
        ingest(store, Numbers(fails_at=7), rows_at_once=rows_at_once)
    assert store.read_table("gpu_samples").num_rows == 7
    rest = Numbers()
    assert ingest(store, rest).total == PutResult(new=3)
    assert rest.began == 7
