import random
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.store import SCHEMAS, FleetStore, PutResult, RetentionPolicy
from meshwright.fleet.store import store as store_module
from meshwright.fleet.tables import EVENTS, JOBS, TABLE_SCHEMAS

pytest.importorskip("duckdb")

START = 1_700_000_100.0  # 15 minutes into an hour, on a window's edge


def samples(first: int = 0, count: int = 20, gpus: int = 4, **metrics: object) -> pa.Table:
    """Samples every 30 s of GPUs, two to a node; values follow from GPU and time."""
    steps = np.tile(np.arange(first, first + count), gpus)
    gpu = np.repeat(np.arange(gpus), count)
    known = metrics or {"gpu_util": (steps + gpu) % 5 / 4, "throttle": np.where(steps % 3, 4.0, 0)}
    columns = {
        "cluster": pa.array(["east"] * len(steps)),
        "node": pa.array([f"n{index // 2}" for index in gpu]),
        "gpu": gpu % 2,
        "time_s": START + 30.0 * steps,
        **known,
    }
    return make_rows("gpu_samples", columns)


def jobs(names: list[str], end_s: list[float | None], seen_s: float, **more: object) -> pa.Table:
    some = {
        "cluster": ["east"] * len(names), "job": names, "attempt": [0] * len(names),
        "submit_s": [1000.0 + 10 * int(name) for name in names], "end_s": end_s,
        "seen_s": [seen_s] * len(names), "nodes": [["n1", "n2"]] * len(names),
    }  # fmt: skip
    return make_rows("jobs", some | more)


def in_order(rows: pa.Table, *keys: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = rows.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return found


@pytest.fixture
def store(tmp_path: Path) -> FleetStore:
    return FleetStore(tmp_path / "store", create=True)


def test_what_was_put_comes_back(store: FleetStore) -> None:
    rows = samples()
    assert store.put("gpu_samples", rows) == PutResult(new=80)
    keys = ("node", "gpu", "time_s")
    assert in_order(store.read_table("gpu_samples"), *keys) == in_order(rows, *keys)


def test_rows_that_come_twice_or_in_parts_are_one_row(store: FleetStore) -> None:
    rows = samples(count=200)
    shuffled = rows.take(np.random.default_rng(1).permutation(rows.num_rows))
    assert store.put("gpu_samples", shuffled.slice(0, 300)).new == 300
    assert store.put("gpu_samples", rows) == PutResult(new=500, duplicates=300)
    assert store.put("gpu_samples", shuffled) == PutResult(duplicates=800)
    assert store.put("gpu_samples", pa.concat_tables([rows, rows])) == PutResult(duplicates=1600)
    assert store.read_table("gpu_samples").num_rows == 800
    assert pc.sum(store.read_table("gpu_rollups_5m")["count"]).as_py() == 800


def test_metrics_that_come_apart_stand_in_one_row(store: FleetStore) -> None:
    store.put("gpu_samples", samples(gpu_util=np.full(80, 0.5)))
    assert store.put("gpu_samples", samples(power_w=np.full(80, 300.0))) == PutResult(updates=80)
    (row,) = (
        store.read_table("gpu_samples", ["gpu_util", "power_w"], where="gpu = 1")
        .slice(0, 1)
        .to_pylist()
    )
    assert row == {"gpu_util": 0.5, "power_w": 300.0}
    apart = pa.concat_tables([samples(20, 10, power_w=np.full(40, 1.0)), samples(20, 10)])
    assert store.put("gpu_samples", apart) == PutResult(new=40, updates=40)
    (mean,) = set(
        store.read_table("gpu_rollups_5m", ["power_w_mean"], until_s=START + 600)[
            "power_w_mean"
        ].to_pylist()
    )
    assert mean == 300.0


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_changes_nothing(tmp_path: Path, seed: int) -> None:
    batches = [samples(first, 60) for first in range(0, 160, 40)]  # each overlaps the next
    batches += [samples(0, 100, gpu_util=np.linspace(0, 1, 400))]  # and one disagrees
    keys = ("node", "gpu", "time_s")

    def kept(order: list[pa.Table]) -> tuple[object, object]:
        with FleetStore(tmp_path / f"{random.random()}", create=True) as one:
            for batch in order:
                one.put("gpu_samples", batch)
            windows = one.read_table(
                "gpu_rollups_5m", [*keys, "count", "gpu_util_max", "throttle_any"]
            )
            return in_order(one.read_table("gpu_samples"), *keys), in_order(windows, *keys)

    mixed = list(batches)
    random.Random(seed).shuffle(mixed)
    assert kept(mixed) == kept(batches)


def test_windows_hold_mean_largest_share_of_zeros_and_count(store: FleetStore) -> None:
    util = np.array([0, 0, 0.5, 1, np.nan, 0.5, 0, 0, 0, 0], np.float32)
    bits = np.array([0, 4, 0, 8, np.nan, 4, 0, 0, 0, 0], np.float32)
    store.put("gpu_samples", samples(count=10, gpus=1, gpu_util=util, throttle=bits))
    (row,) = store.read_table("gpu_rollups_5m").to_pylist()
    assert (row["node"], row["gpu"], row["time_s"], row["count"]) == ("n0", 0, START, 10)
    assert row["gpu_util_mean"] == pytest.approx(2 / 9)
    assert row["gpu_util_max"] == 1
    assert row["gpu_util_zero"] == pytest.approx(6 / 9)
    assert row["gpu_util_count"] == 9
    assert row["throttle_any"] == 12
    assert row["power_w_mean"] is None
    assert row["power_w_count"] == 0


def test_a_window_whose_samples_came_in_two_batches_is_one(store: FleetStore) -> None:
    whole = samples(count=10, gpus=2)
    early = whole.filter(pc.less(whole["time_s"], START + 100))
    late = whole.filter(pc.greater_equal(whole["time_s"], START + 100))
    store.put("gpu_samples", early)
    store.put("gpu_samples", late)
    halves = in_order(store.read_table("gpu_rollups_5m"), "gpu")
    with FleetStore(store.folder.parent / "whole", create=True) as other:
        other.put("gpu_samples", whole)
        for one, two in zip(
            halves, in_order(other.read_table("gpu_rollups_5m"), "gpu"), strict=True
        ):
            assert one == pytest.approx(two, nan_ok=True)


def test_many_small_batches_become_few_files(store: FleetStore) -> None:
    for step in range(20):
        store.put("gpu_samples", samples(step, 1))
    files = list(store.folder.glob("gpu_samples/**/*.parquet"))
    listed = store._manifest.list_files("gpu_samples")
    assert len(listed) <= store_module.MAX_FILES_PER_BUCKET
    assert len(files) > len(listed)
    assert store.read_table("gpu_samples").num_rows == 80
    assert pc.sum(store.read_table("gpu_rollups_5m")["count"]).as_py() == 80


def test_a_large_file_is_not_written_again_for_small_ones(store: FleetStore) -> None:
    store.put("gpu_samples", samples(0, 60))
    (large,) = store._manifest.list_files("gpu_samples")
    for step in range(60, 60 + 2 * store_module.MAX_FILES_PER_BUCKET):
        store.put("gpu_samples", samples(step, 1))
    assert large in store._manifest.list_files("gpu_samples")
    assert len(store._manifest.list_files("gpu_samples")) <= store_module.MAX_FILES_PER_BUCKET
    assert store.read_table("gpu_samples").num_rows == 4 * (
        60 + 2 * store_module.MAX_FILES_PER_BUCKET
    )


def test_writers_wait_for_each_other_and_readers_see_whole_steps(tmp_path: Path) -> None:
    folder, seen = tmp_path / "store", set[int]()

    def write(offset: int) -> None:
        with FleetStore(folder, create=True) as mine:
            for step in range(offset, 24, 2):
                mine.put("gpu_samples", samples(step, 2))
                seen.add(mine.read_table("gpu_samples").num_rows % 4)

    writers = [threading.Thread(target=write, args=[offset]) for offset in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    with FleetStore(folder) as store:
        assert store.read_table("gpu_samples").num_rows == 25 * 4
        assert pc.sum(store.read_table("gpu_rollups_5m")["count"]).as_py() == 25 * 4
    assert seen == {0}


def test_the_version_seen_last_holds_whatever_comes_first(store: FleetStore) -> None:
    running = jobs(["1", "2"], [None, None], seen_s=2000.0)
    ended = jobs(["1", "3"], [1800.0, 1900.0], seen_s=2100.0)
    assert store.put("jobs", running) == PutResult(new=2)
    assert store.put("jobs", ended) == PutResult(new=1, updates=1)
    assert store.put("jobs", running) == PutResult(duplicates=2)
    found = in_order(store.read_table("jobs", ["job", "end_s"]), "job")
    assert [row["end_s"] for row in found] == [1800.0, None, 1900.0]
    assert store.table_sizes()["jobs"].num_rows == 3


def test_versions_seen_at_one_moment_are_told_apart_without_regard_to_order(tmp_path: Path) -> None:
    one, two = (jobs(["1"], [end], seen_s=5.0) for end in (1800.0, 1900.0))
    held = []
    for place, order in enumerate(([one, two], [two, one], [pa.concat_tables([two, one])])):
        with FleetStore(tmp_path / str(place), create=True) as store:
            for rows in order:
                store.put("jobs", rows)
            held.append(store.read_table("jobs").to_pylist())
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 1


def test_jobs_told_again_and_again_do_not_pile_up(store: FleetStore) -> None:
    for turn in range(12):
        store.put("jobs", jobs(["1", "2", str(turn + 3)], [None, None, 2000.0], seen_s=turn))
    assert store.read_table("jobs").num_rows == 14
    assert sum(part.rows for part in store._manifest.list_files("jobs")) < 28
    assert set(store.read_table("jobs", where="job = '1'")["seen_s"].to_pylist()) == {11.0}


def test_a_large_file_of_jobs_is_not_written_again_for_small_ones(store: FleetStore) -> None:
    store.put("jobs", jobs([str(name) for name in range(200)], [None] * 200, seen_s=0.0))
    (large,) = store._manifest.list_files("jobs")
    for turn in range(2 * store_module.MAX_FILES_PER_BUCKET):
        store.put("jobs", jobs(["7", "8", str(200 + turn)], [None, 1.0, 2.0], seen_s=turn + 1.0))
        assert store.read_table("jobs").num_rows == 201 + turn
        assert store.table_sizes()["jobs"].num_rows == 201 + turn
    assert large in store._manifest.list_files("jobs")
    assert len(store._manifest.list_files("jobs")) <= store_module.MAX_FILES_PER_BUCKET


def test_a_question_of_time_finds_what_any_part_of_which_lies_there(store: FleetStore) -> None:
    store.put("jobs", jobs(["1", "2", "3"], [1500.0, None, 1100.0], seen_s=1.0))
    found = store.read_table("jobs", ["job"], since_s=1200.0, until_s=1300.0)
    assert sorted(found["job"].to_pylist()) == ["1", "2"]
    store.put("gpu_samples", samples())
    found = store.read_table("gpu_samples", ["time_s"], since_s=START + 30, until_s=START + 90)
    assert sorted(set(found["time_s"].to_pylist())) == [START + 30, START + 60]
    assert store.read_table("gpu_samples", since_s=START + 1e6).num_rows == 0
    ever = store.read_table(
        "gpu_samples", since_s=np.float64(-np.inf), until_s=np.float64(START + 30)
    )
    assert ever.num_rows == 4


def test_events_of_a_node_have_no_gpu_and_count_once(store: FleetStore) -> None:
    columns = {
        "cluster": ["east"] * 3, "node": ["n1"] * 3, "gpu": [None, 0, None],
        "time_s": [START] * 3, "kind": ["drain", "xid", "drain"], "code": [None, 79, None],
        "text": ["by hand", None, None],
    }  # fmt: skip
    rows = make_rows("events", columns)
    assert store.put("events", rows) == PutResult(new=2, duplicates=1)
    assert store.put("events", rows) == PutResult(duplicates=3)
    texts = {row["kind"]: row["text"] for row in store.read_table("events").to_pylist()}
    assert texts == {"drain": "by hand", "xid": None}


def test_sql_sees_the_tables_and_nothing_else_on_the_machine(
    store: FleetStore, tmp_path: Path
) -> None:
    store.put("gpu_samples", samples())
    store.put("jobs", jobs(["1"], [None], seen_s=1.0))
    (row,) = store.sql("SELECT count(*) AS n, max(job) AS job FROM gpu_samples, jobs").to_pylist()
    assert row == {"n": 80, "job": "1"}
    assert store.sql("SELECT * FROM allocations").num_rows == 0
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(InputError, match="Permission"):
        store.sql(f"SELECT * FROM read_csv('{secret}')")
    with pytest.raises(InputError, match="tables are jobs"):
        store.sql("SELECT * FROM jbos")


def test_samples_leave_windows_and_windows_leave_hours(store: FleetStore) -> None:
    rows = samples(count=300)
    store.put("gpu_samples", rows)
    now_s = START + 10 * 86_400
    mean = pc.mean(rows["gpu_util"]).as_py()
    assert store.apply_retention(RetentionPolicy(samples=5, rollups_5m=30), now_s).deleted_rows == {
        "gpu_samples": 1200
    }
    assert store.put("gpu_samples", rows) == PutResult(late=1200)
    assert pc.sum(store.read_table("gpu_rollups_5m")["count"]).as_py() == 1200
    assert (
        store.apply_retention(RetentionPolicy(samples=5, rollups_5m=8), now_s).deleted_rows[
            "gpu_rollups_5m"
        ]
        == 120
    )
    hours = store.read_table("gpu_rollups_1h", ["count", "gpu_util_mean", "gpu_util_count"])
    assert hours.num_rows == 4 * 3  # GPUs by the hours that 150 minutes touch
    weighed = pc.sum(pc.multiply(hours["gpu_util_mean"], hours["gpu_util_count"])).as_py()
    assert weighed / 1200 == pytest.approx(mean)
    assert store.read_table("gpu_rollups_5m").num_rows == 0


def test_jobs_that_ended_long_ago_are_forgotten_and_stay_so(store: FleetStore) -> None:
    old = jobs(["1", "2"], [None, None], seen_s=900.0)
    ended = jobs(["1", "2"], [1500.0, None], seen_s=90_000.0)
    store.put("jobs", old)
    store.put("jobs", ended)
    kept = store.apply_retention(RetentionPolicy(records=0.5), now_s=86_400.0)
    assert kept.deleted_rows == {"jobs": 1}
    assert store.put("jobs", old) == PutResult(late=2)
    assert store.read_table("jobs", ["job"])["job"].to_pylist() == ["2"]


def test_files_from_before_a_table_gained_a_column_are_still_read(
    store: FleetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"cluster": ["east"], "node": ["n1"], "gpu": [0], "time_s": [START], "kind": ["xid"]}
    with monkeypatch.context() as before:
        for tables in (TABLE_SCHEMAS, SCHEMAS):
            before.setitem(tables, "jobs", JOBS.remove(JOBS.get_field_index("gpus")))
            before.setitem(tables, "events", EVENTS.remove(EVENTS.get_field_index("text")))
        store.put("jobs", jobs(["1", "2"], [None, None], seen_s=1.0))
        store.put("events", make_rows("events", event))
    assert store.read_table("jobs", ["gpus"])["gpus"].null_count == 2
    now = jobs(["2", "3"], [None, None], seen_s=2.0, gpus=[8.0, 4.0])
    assert store.put("jobs", now) == PutResult(new=1, updates=1)
    assert sorted(store.read_table("jobs", where="gpus > 0")["job"].to_pylist()) == ["2", "3"]
    assert store.put("events", make_rows("events", event | {"text": ["gone"]})) == PutResult(
        updates=1
    )
    assert store.read_table("events", ["text"])["text"].to_pylist() == ["gone"]


def test_limits_that_contradict_each_other_are_refused(store: FleetStore) -> None:
    with pytest.raises(InputError, match="outlast"):
        store.apply_retention(RetentionPolicy(samples=30, rollups_5m=7))
    with pytest.raises(InputError, match="negative"):
        store.apply_retention(RetentionPolicy(samples=-1))


def test_only_the_owner_may_read(store: FleetStore) -> None:
    store.put("gpu_samples", samples())
    store.put("jobs", jobs(["1"], [None], seen_s=1.0))
    store.set_cursor("here", "there")
    for path in [store.folder, *store.folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_clusters_are_kept_apart_whatever_they_are_called(store: FleetStore) -> None:
    rows = jobs(["1", "1"], [None, None], seen_s=1.0, cluster=["a/../b", ""])
    assert store.put("jobs", rows).new == 2
    assert store.list_clusters() == ("", "a/../b")
    assert not (store.folder / "jobs" / "b").exists()


def test_moments_come_day_by_day(store: FleetStore) -> None:
    times = START + 3600.0 * np.arange(60)
    columns = {"cluster": ["east"] * 60, "node": ["n1"] * 60, "time_s": times, "cpu_util": times}
    store.put("node_samples", make_rows("node_samples", columns))
    days = [rows.num_rows for rows in store.iter_days("node_samples", ["time_s"])]
    assert sum(days) == 60
    assert len(days) == 4
    assert [rows.num_rows for rows in store.iter_days("node_samples", until_s=START + 3600)] == [1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda rows: rows.drop_columns(["node"]), "node: is missing"),
        (lambda rows: rows.append_column("power", rows["gpu_util"]), "power_w"),
        (lambda rows: rows.set_column(3, "time_s", pa.nulls(80, pa.float64())), "80 of 80"),
        (
            lambda rows: rows.set_column(3, "time_s", pc.multiply(rows["time_s"], 1000.0)),
            "divide milliseconds",
        ),
        (lambda rows: rows.set_column(2, "gpu", pa.array(["x"] * 80)), "samples.gpu"),
    ],
)
def test_rows_that_cannot_be_kept_are_refused_by_name(
    store: FleetStore, change: Callable[[pa.Table], pa.Table], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        store.put("gpu_samples", change(samples()))
    assert store.read_table("gpu_samples").num_rows == 0


def test_a_damaged_file_is_named(store: FleetStore) -> None:
    store.put("gpu_samples", samples())
    (part,) = store._manifest.list_files("gpu_samples")
    (store.folder / part.file).write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=part.file):
        store.put("gpu_samples", samples())
    with pytest.raises(InputError, match=part.file):
        store.read_table("gpu_samples")


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no fleet store"):
        FleetStore(tmp_path)
    (tmp_path / "manifest.sqlite").write_text("something else that is long enough" * 10)
    with pytest.raises(InputError, match="not the manifest of a store"):
        FleetStore(tmp_path)


def test_a_store_of_an_older_format_is_refused(tmp_path: Path) -> None:
    with FleetStore(tmp_path / "new", create=True) as store:
        store.put("gpu_samples", samples())
    link = sqlite3.connect(tmp_path / "new" / "manifest.sqlite")
    link.execute("PRAGMA user_version = 2")
    link.close()
    with pytest.raises(InputError, match="has format 2; this version reads 3"):
        FleetStore(tmp_path / "new")


def test_a_store_that_an_older_version_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"")
    for create in (False, True):
        with pytest.raises(InputError, match=r"it has catalog\.sqlite, not manifest\.sqlite"):
            FleetStore(tmp_path, create=create)
