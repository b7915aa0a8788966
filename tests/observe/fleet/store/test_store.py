import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from meshwright.errors import InputError
from meshwright.observe.fleet.sources import rows_of
from meshwright.observe.fleet.store import SCHEMAS, Limits, Put, Store
from meshwright.observe.fleet.store import store as store_module
from meshwright.observe.fleet.tables import EVENTS, JOBS, TABLES

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
    return rows_of("samples", columns)


def jobs(names: list[str], end_s: list[float | None], seen_s: float, **more: object) -> pa.Table:
    some = {
        "cluster": ["east"] * len(names), "job": names, "attempt": [0] * len(names),
        "submit_s": [1000.0 + 10 * int(name) for name in names], "end_s": end_s,
        "seen_s": [seen_s] * len(names), "nodes": [["n1", "n2"]] * len(names),
    }  # fmt: skip
    return rows_of("jobs", some | more)


def in_order(rows: pa.Table, *keys: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = rows.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", create=True)


def test_what_was_put_comes_back(store: Store) -> None:
    rows = samples()
    assert store.put("samples", rows) == Put(new=80)
    keys = ("node", "gpu", "time_s")
    assert in_order(store.table("samples"), *keys) == in_order(rows, *keys)


def test_rows_that_come_twice_or_in_parts_are_one_row(store: Store) -> None:
    rows = samples(count=200)
    shuffled = rows.take(np.random.default_rng(1).permutation(rows.num_rows))
    assert store.put("samples", shuffled.slice(0, 300)).new == 300
    assert store.put("samples", rows) == Put(new=500, same=300)
    assert store.put("samples", shuffled) == Put(same=800)
    assert store.put("samples", pa.concat_tables([rows, rows])) == Put(same=1600)
    assert store.table("samples").num_rows == 800
    assert pc.sum(store.table("windows")["count"]).as_py() == 800


def test_metrics_that_come_apart_stand_in_one_row(store: Store) -> None:
    store.put("samples", samples(gpu_util=np.full(80, 0.5)))
    assert store.put("samples", samples(power_w=np.full(80, 300.0))) == Put(newer=80)
    (row,) = (
        store.table("samples", ["gpu_util", "power_w"], where="gpu = 1").slice(0, 1).to_pylist()
    )
    assert row == {"gpu_util": 0.5, "power_w": 300.0}
    apart = pa.concat_tables([samples(20, 10, power_w=np.full(40, 1.0)), samples(20, 10)])
    assert store.put("samples", apart) == Put(new=40, newer=40)
    (mean,) = set(
        store.table("windows", ["power_w_mean"], until_s=START + 600)["power_w_mean"].to_pylist()
    )
    assert mean == 300.0


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_changes_nothing(tmp_path: Path, seed: int) -> None:
    batches = [samples(first, 60) for first in range(0, 160, 40)]  # each overlaps the next
    batches += [samples(0, 100, gpu_util=np.linspace(0, 1, 400))]  # and one disagrees
    keys = ("node", "gpu", "time_s")

    def kept(order: list[pa.Table]) -> tuple[object, object]:
        with Store(tmp_path / f"{random.random()}", create=True) as one:
            for batch in order:
                one.put("samples", batch)
            windows = one.table("windows", [*keys, "count", "gpu_util_max", "throttle_any"])
            return in_order(one.table("samples"), *keys), in_order(windows, *keys)

    mixed = list(batches)
    random.Random(seed).shuffle(mixed)
    assert kept(mixed) == kept(batches)


def test_windows_hold_mean_largest_share_of_zeros_and_count(store: Store) -> None:
    util = np.array([0, 0, 0.5, 1, np.nan, 0.5, 0, 0, 0, 0], np.float32)
    bits = np.array([0, 4, 0, 8, np.nan, 4, 0, 0, 0, 0], np.float32)
    store.put("samples", samples(count=10, gpus=1, gpu_util=util, throttle=bits))
    (row,) = store.table("windows").to_pylist()
    assert (row["node"], row["gpu"], row["time_s"], row["count"]) == ("n0", 0, START, 10)
    assert row["gpu_util_mean"] == pytest.approx(2 / 9)
    assert row["gpu_util_max"] == 1
    assert row["gpu_util_zero"] == pytest.approx(6 / 9)
    assert row["gpu_util_count"] == 9
    assert row["throttle_any"] == 12
    assert row["power_w_mean"] is None
    assert row["power_w_count"] == 0


def test_a_window_whose_samples_came_in_two_batches_is_one(store: Store) -> None:
    whole = samples(count=10, gpus=2)
    early = whole.filter(pc.less(whole["time_s"], START + 100))
    late = whole.filter(pc.greater_equal(whole["time_s"], START + 100))
    store.put("samples", early)
    store.put("samples", late)
    halves = in_order(store.table("windows"), "gpu")
    with Store(store.folder.parent / "whole", create=True) as other:
        other.put("samples", whole)
        for one, two in zip(halves, in_order(other.table("windows"), "gpu"), strict=True):
            assert one == pytest.approx(two, nan_ok=True)


def test_many_small_batches_become_few_files(store: Store) -> None:
    for step in range(20):
        store.put("samples", samples(step, 1))
    files = list(store.folder.glob("samples/**/*.parquet"))
    listed = store._catalog.parts("samples")
    assert len(listed) <= store_module.MOST_PARTS
    assert len(files) > len(listed)
    assert store.table("samples").num_rows == 80
    assert pc.sum(store.table("windows")["count"]).as_py() == 80


def test_a_large_file_is_not_written_again_for_small_ones(store: Store) -> None:
    store.put("samples", samples(0, 60))
    (large,) = store._catalog.parts("samples")
    for step in range(60, 60 + 2 * store_module.MOST_PARTS):
        store.put("samples", samples(step, 1))
    assert large in store._catalog.parts("samples")
    assert len(store._catalog.parts("samples")) <= store_module.MOST_PARTS
    assert store.table("samples").num_rows == 4 * (60 + 2 * store_module.MOST_PARTS)


def test_writers_wait_for_each_other_and_readers_see_whole_steps(tmp_path: Path) -> None:
    folder, seen = tmp_path / "store", set[int]()

    def write(offset: int) -> None:
        with Store(folder, create=True) as mine:
            for step in range(offset, 24, 2):
                mine.put("samples", samples(step, 2))
                seen.add(mine.table("samples").num_rows % 4)

    writers = [threading.Thread(target=write, args=[offset]) for offset in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    with Store(folder) as store:
        assert store.table("samples").num_rows == 25 * 4
        assert pc.sum(store.table("windows")["count"]).as_py() == 25 * 4
    assert seen == {0}


def test_the_version_seen_last_holds_whatever_comes_first(store: Store) -> None:
    running = jobs(["1", "2"], [None, None], seen_s=2000.0)
    ended = jobs(["1", "3"], [1800.0, 1900.0], seen_s=2100.0)
    assert store.put("jobs", running) == Put(new=2)
    assert store.put("jobs", ended) == Put(new=1, newer=1)
    assert store.put("jobs", running) == Put(same=2)
    found = in_order(store.table("jobs", ["job", "end_s"]), "job")
    assert [row["end_s"] for row in found] == [1800.0, None, 1900.0]
    assert store.held()["jobs"].rows == 3


def test_versions_seen_at_one_moment_are_told_apart_without_regard_to_order(tmp_path: Path) -> None:
    one, two = (jobs(["1"], [end], seen_s=5.0) for end in (1800.0, 1900.0))
    held = []
    for place, order in enumerate(([one, two], [two, one], [pa.concat_tables([two, one])])):
        with Store(tmp_path / str(place), create=True) as store:
            for rows in order:
                store.put("jobs", rows)
            held.append(store.table("jobs").to_pylist())
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 1


def test_jobs_told_again_and_again_do_not_pile_up(store: Store) -> None:
    for turn in range(12):
        store.put("jobs", jobs(["1", "2", str(turn + 3)], [None, None, 2000.0], seen_s=turn))
    assert store.table("jobs").num_rows == 14
    assert sum(part.rows for part in store._catalog.parts("jobs")) < 28
    assert set(store.table("jobs", where="job = '1'")["seen_s"].to_pylist()) == {11.0}


def test_a_large_file_of_jobs_is_not_written_again_for_small_ones(store: Store) -> None:
    store.put("jobs", jobs([str(name) for name in range(200)], [None] * 200, seen_s=0.0))
    (large,) = store._catalog.parts("jobs")
    for turn in range(2 * store_module.MOST_PARTS):
        store.put("jobs", jobs(["7", "8", str(200 + turn)], [None, 1.0, 2.0], seen_s=turn + 1.0))
        assert store.table("jobs").num_rows == 201 + turn
        assert store.held()["jobs"].rows == 201 + turn
    assert large in store._catalog.parts("jobs")
    assert len(store._catalog.parts("jobs")) <= store_module.MOST_PARTS


def test_a_question_of_time_finds_what_any_part_of_which_lies_there(store: Store) -> None:
    store.put("jobs", jobs(["1", "2", "3"], [1500.0, None, 1100.0], seen_s=1.0))
    found = store.table("jobs", ["job"], since_s=1200.0, until_s=1300.0)
    assert sorted(found["job"].to_pylist()) == ["1", "2"]
    store.put("samples", samples())
    found = store.table("samples", ["time_s"], since_s=START + 30, until_s=START + 90)
    assert sorted(set(found["time_s"].to_pylist())) == [START + 30, START + 60]
    assert store.table("samples", since_s=START + 1e6).num_rows == 0
    ever = store.table("samples", since_s=np.float64(-np.inf), until_s=np.float64(START + 30))
    assert ever.num_rows == 4


def test_events_of_a_node_have_no_gpu_and_count_once(store: Store) -> None:
    columns = {
        "cluster": ["east"] * 3, "node": ["n1"] * 3, "gpu": [None, 0, None],
        "time_s": [START] * 3, "kind": ["drain", "xid", "drain"], "code": [None, 79, None],
        "text": ["by hand", None, None],
    }  # fmt: skip
    rows = rows_of("events", columns)
    assert store.put("events", rows) == Put(new=2, same=1)
    assert store.put("events", rows) == Put(same=3)
    texts = {row["kind"]: row["text"] for row in store.table("events").to_pylist()}
    assert texts == {"drain": "by hand", "xid": None}


def test_sql_sees_the_tables_and_nothing_else_on_the_machine(store: Store, tmp_path: Path) -> None:
    store.put("samples", samples())
    store.put("jobs", jobs(["1"], [None], seen_s=1.0))
    (row,) = store.sql("SELECT count(*) AS n, max(job) AS job FROM samples, jobs").to_pylist()
    assert row == {"n": 80, "job": "1"}
    assert store.sql("SELECT * FROM held").num_rows == 0
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(InputError, match="Permission"):
        store.sql(f"SELECT * FROM read_csv('{secret}')")
    with pytest.raises(InputError, match="tables are jobs"):
        store.sql("SELECT * FROM jbos")


def test_samples_leave_windows_and_windows_leave_hours(store: Store) -> None:
    rows = samples(count=300)
    store.put("samples", rows)
    now_s = START + 10 * 86_400
    mean = pc.mean(rows["gpu_util"]).as_py()
    assert store.keep(Limits(samples=5, windows=30), now_s).rows == {"samples": 1200}
    assert store.put("samples", rows) == Put(late=1200)
    assert pc.sum(store.table("windows")["count"]).as_py() == 1200
    assert store.keep(Limits(samples=5, windows=8), now_s).rows["windows"] == 120
    hours = store.table("hours", ["count", "gpu_util_mean", "gpu_util_count"])
    assert hours.num_rows == 4 * 3  # GPUs by the hours that 150 minutes touch
    weighed = pc.sum(pc.multiply(hours["gpu_util_mean"], hours["gpu_util_count"])).as_py()
    assert weighed / 1200 == pytest.approx(mean)
    assert store.table("windows").num_rows == 0


def test_jobs_that_ended_long_ago_are_forgotten_and_stay_so(store: Store) -> None:
    old = jobs(["1", "2"], [None, None], seen_s=900.0)
    ended = jobs(["1", "2"], [1500.0, None], seen_s=90_000.0)
    store.put("jobs", old)
    store.put("jobs", ended)
    kept = store.keep(Limits(others=0.5), now_s=86_400.0)
    assert kept.rows == {"jobs": 1}
    assert store.put("jobs", old) == Put(late=2)
    assert store.table("jobs", ["job"])["job"].to_pylist() == ["2"]


def test_files_from_before_a_table_gained_a_column_are_still_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"cluster": ["east"], "node": ["n1"], "gpu": [0], "time_s": [START], "kind": ["xid"]}
    with monkeypatch.context() as before:
        for tables in (TABLES, SCHEMAS):
            before.setitem(tables, "jobs", JOBS.remove(JOBS.get_field_index("gpus")))
            before.setitem(tables, "events", EVENTS.remove(EVENTS.get_field_index("text")))
        store.put("jobs", jobs(["1", "2"], [None, None], seen_s=1.0))
        store.put("events", rows_of("events", event))
    assert store.table("jobs", ["gpus"])["gpus"].null_count == 2
    now = jobs(["2", "3"], [None, None], seen_s=2.0, gpus=[8.0, 4.0])
    assert store.put("jobs", now) == Put(new=1, newer=1)
    assert sorted(store.table("jobs", where="gpus > 0")["job"].to_pylist()) == ["2", "3"]
    assert store.put("events", rows_of("events", event | {"text": ["gone"]})) == Put(newer=1)
    assert store.table("events", ["text"])["text"].to_pylist() == ["gone"]


def test_limits_that_contradict_each_other_are_refused(store: Store) -> None:
    with pytest.raises(InputError, match="outlast"):
        store.keep(Limits(samples=30, windows=7))
    with pytest.raises(InputError, match="negative"):
        store.keep(Limits(samples=-1))


def test_only_the_owner_may_read(store: Store) -> None:
    store.put("samples", samples())
    store.put("jobs", jobs(["1"], [None], seen_s=1.0))
    store.set_cursor("here", "there")
    for path in [store.folder, *store.folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_clusters_are_kept_apart_whatever_they_are_called(store: Store) -> None:
    rows = jobs(["1", "1"], [None, None], seen_s=1.0, cluster=["a/../b", ""])
    assert store.put("jobs", rows).new == 2
    assert store.clusters() == ("", "a/../b")
    assert not (store.folder / "jobs" / "b").exists()


def test_moments_come_day_by_day(store: Store) -> None:
    times = START + 3600.0 * np.arange(60)
    columns = {"cluster": ["east"] * 60, "node": ["n1"] * 60, "time_s": times, "cpu_util": times}
    store.put("node_samples", rows_of("node_samples", columns))
    days = [rows.num_rows for rows in store.days("node_samples", ["time_s"])]
    assert sum(days) == 60
    assert len(days) == 4
    assert [rows.num_rows for rows in store.days("node_samples", until_s=START + 3600)] == [1]


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
    store: Store, change: Callable[[pa.Table], pa.Table], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        store.put("samples", change(samples()))
    assert store.table("samples").num_rows == 0


def test_a_damaged_file_is_named(store: Store) -> None:
    store.put("samples", samples())
    (part,) = store._catalog.parts("samples")
    (store.folder / part.file).write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=part.file):
        store.put("samples", samples())
    with pytest.raises(InputError, match=part.file):
        store.table("samples")


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no fleet store"):
        Store(tmp_path)
    (tmp_path / "catalog.sqlite").write_text("something else that is long enough" * 10)
    with pytest.raises(InputError, match="no catalog"):
        Store(tmp_path)
