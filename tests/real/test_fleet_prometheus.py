"""A fleet's telemetry through real servers: Debian's Prometheus and VictoriaMetrics on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from meshwright.fleet.exporter import ExporterCollector, JobFolder, serve_metrics
from meshwright.fleet.ingestion import ingest
from meshwright.fleet.sources.prometheus import prometheus_source
from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.prometheus_source import PrometheusSource
from meshwright.fleet.sources.prometheus.promql_text import match_any, match_value
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source
from meshwright.fleet.store import FleetStore
from meshwright.fleet.tables import TABLE_SCHEMAS
from tests.real.planted_fleet import HOURS, STEP, T0, planted, planted_pods
from tests.real.prometheus_server import Server, free_port, prometheus, scraping, victoria_metrics

pytestmark = [pytest.mark.real, pytest.mark.slow]

ASKED = SourceOptions(cluster="c", since_s=T0, until_s=T0 + 3600 * HOURS, sample_step_s=STEP)
Tables = dict[str, pa.Table]


@pytest.fixture(scope="module", params=[prometheus, victoria_metrics])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    try:
        with request.param(tmp_path_factory.mktemp("server"), planted()) as running:
            yield running
    except FileNotFoundError as missing:
        pytest.skip(f"needs Debian's {missing}")


@pytest.fixture(scope="module")
def tables(server: Server) -> Tables:
    return _read(prometheus_source.open_source(server.url, ASKED))[0]


def _read(found: Any, cursor: str | None = None) -> tuple[Tables, str | None, list[str]]:
    """Read everything there is, as whoever ingests does."""
    parts: dict[str, list[pa.Table]] = {name: [] for name in TABLE_SCHEMAS}
    notes: list[str] = []
    for batch in found.read_batches(cursor):
        parts[batch.table].append(batch.rows)
        cursor, notes = batch.cursor or cursor, [*notes, *batch.notes]
    joined = {name: pa.concat_tables([TABLE_SCHEMAS[name].empty_table(), *rows])
              for name, rows in parts.items()}  # fmt: skip
    return joined, cursor, notes


def _of(table: pa.Table, node: str, gpu: int | None = None) -> pa.Table:
    where = pc.field("node") == node
    return table.filter(where if gpu is None else where & (pc.field("gpu") == gpu))


def _minutes(column: Any) -> list[float | None]:
    return [None if each is None else (each - T0) / 60 for each in column.to_pylist()]


def test_old_and_new_names_end_in_the_same_columns_and_units(tables: Tables) -> None:
    first, other = _of(tables["gpu_samples"], "n1", 0), _of(tables["gpu_samples"], "n2", 0)
    assert pc.max(first["gpu_util"]).as_py() == pytest.approx(0.9)
    assert pc.min_max(other["gpu_util"]).as_py() == {"min": 0.5, "max": 0.5}
    assert pc.mean(other["tensor_active"]).as_py() == 0.25
    assert pc.max(first["memory_used"]).as_py() == 40000 * 2**20
    assert pc.max(first["memory_total"]).as_py() == 81500 * 2**20


def test_blank_values_are_null(tables: Tables) -> None:
    first = _of(tables["gpu_samples"], "n1", 0)
    blank = first.filter(pc.field("time_s") <= T0 + 300)
    assert blank["power_w"].null_count == blank["sm_active"].null_count == blank.num_rows == 10
    assert pc.max(first["power_w"]).as_py() == 300


def test_an_exporter_that_falls_silent_leaves_no_rows(tables: Tables) -> None:
    minutes = _minutes(_of(tables["gpu_samples"], "n1", 0)["time_s"])
    assert not [each for each in minutes if each is not None and 50 < each < 58]
    assert len(minutes) == 240 - 15


def test_instances_of_a_divided_gpu_count_by_their_part(tables: Tables) -> None:
    samples = _of(tables["gpu_samples"], "n3", 0)
    assert pc.mean(samples["engine_active"]).as_py() == pytest.approx(0.5 * 4 / 7)
    assert pc.max(samples["memory_used"]).as_py() == 2 * 2**30
    assert samples["gpu_util"].null_count == samples.num_rows


def test_a_device_keeps_its_uuid_when_its_index_changes(tables: Tables) -> None:
    gpus = _of(tables["gpus"], "n1").sort_by([("since_s", "ascending"), ("gpu", "ascending")])
    assert gpus["uuid"].to_pylist() == ["GPU-a", "GPU-b", "GPU-b"]
    assert gpus["gpu"].to_pylist() == [0, 1, 0]
    assert _minutes(gpus["since_s"]) == [0, 0, 90]
    assert _minutes(gpus["until_s"]) == [90, 90, None]
    assert _of(tables["gpus"], "n3")["uuid"].to_pylist() == ["GPU-d"]


def test_labels_tell_which_job_held_a_gpu(tables: Tables) -> None:
    held = tables["allocations"].sort_by("job")
    assert held["job"].to_pylist() == ["71", "81", "82", "ml/train-0"]
    assert held["node"].to_pylist() == ["n1", "n4", "n4", "n2"]
    assert _minutes(held["start_s"]) == [10, 20, 60, 0]
    assert _minutes(held["end_s"]) == [40, 60, 120, 120]


def test_time_for_which_clocks_were_held_back_stands_in_for_the_reasons(tables: Tables) -> None:
    first, second = _of(tables["gpu_samples"], "n1", 0), _of(tables["gpu_samples"], "n1", 1)
    power = first.filter(pc.field("throttle") == 4)
    minutes = [each for each in _minutes(power["time_s"]) if each is not None]
    assert 12 < min(minutes) <= 13
    assert 30 <= max(minutes) < 33
    assert pc.max(second["throttle"]).as_py() == 0
    assert _of(tables["gpu_samples"], "n2")["throttle"].null_count == 240


def test_an_xid_that_stays_is_one_event(tables: Tables) -> None:
    xids = tables["events"].filter(pc.field("kind") == "xid").sort_by("time_s")
    assert xids["code"].to_pylist() == [31, 79]
    assert _minutes(xids["time_s"]) == [40.5, 80]


def test_a_counter_that_begins_anew_rises_by_what_it_shows(tables: Tables) -> None:
    ecc = tables["events"].filter(pc.field("kind") == "ecc_corrected").sort_by("time_s")
    assert _minutes(ecc["time_s"]) == [30, 70]
    assert ecc["count"].to_pylist() == [2, 1]


def test_nodes_have_their_own_names_and_shares(tables: Tables) -> None:
    nodes = tables["node_samples"]
    assert set(nodes["node"].to_pylist()) == {"n1"}
    assert pc.min_max(nodes["cpu_util"]).as_py() == {"min": 0.25, "max": 0.25}
    assert pc.approximate_median(nodes["io_wait"]).as_py() == 0.25
    assert pc.approximate_median(nodes["storage_read"]).as_py() == pytest.approx(1e8)
    assert pc.approximate_median(nodes["net_tx"]).as_py() == pytest.approx(1e9)
    assert pc.max(nodes["memory_used"]).as_py() == pytest.approx(4e11)
    downs = tables["events"].filter(pc.field("kind") == "infiniband")
    assert downs["node"].to_pylist() == ["n1"]
    assert downs["gpu"].to_pylist() == [None]
    assert _minutes(downs["time_s"]) == [70]


def test_roll_ups_of_five_minutes_are_the_means_of_what_was_measured(
    server: Server, tables: Tables
) -> None:
    rolled, _, _ = _read(
        prometheus_source.open_source(server.url, ASKED._replace(sample_step_s=300.0))
    )
    busy = _of(rolled["gpu_samples"], "n1", 0).filter(pc.field("time_s") == T0 + 900)
    assert busy["gpu_util"].to_pylist() == [pytest.approx(0.9)]
    # Ten of these minutes began with a blank: what a mean with one says is not kept.
    early = _of(rolled["gpu_samples"], "n1", 0).filter(pc.field("time_s") == T0 + 300)
    assert early["sm_active"].to_pylist() == early["power_w"].to_pylist() == [None]
    assert rolled["gpu_samples"].num_rows < tables["gpu_samples"].num_rows / 9


def test_going_on_from_a_cursor_gives_the_rows_of_one_reading(
    server: Server, tables: Tables
) -> None:
    first, cursor, _ = _read(
        prometheus_source.open_source(server.url, ASKED._replace(until_s=T0 + 3630))
    )
    second, _, _ = _read(prometheus_source.open_source(server.url, ASKED), cursor)
    both = {
        (row["node"], row["gpu"], row["time_s"]): row
        for part in (first, second)
        for row in part["gpu_samples"].to_pylist()
    }
    whole = {
        (row["node"], row["gpu"], row["time_s"]): row for row in tables["gpu_samples"].to_pylist()
    }
    assert both == whole
    starts = {
        (row["job"], row["start_s"])
        for part in (first, second)
        for row in part["allocations"].to_pylist()
    }
    assert starts == {(row["job"], row["start_s"]) for row in tables["allocations"].to_pylist()}
    since = {(row["uuid"], row["gpu"], row["since_s"]) for part in (first, second)
             for row in part["gpus"].to_pylist()}  # fmt: skip
    assert since == {
        (row["uuid"], row["gpu"], row["since_s"]) for row in tables["gpus"].to_pylist()
    }
    happened = {(row["kind"], row["time_s"]) for part in (first, second)
                for row in part["events"].to_pylist()}  # fmt: skip
    assert happened == {(row["kind"], row["time_s"]) for row in tables["events"].to_pylist()}


def test_clusters_on_one_server_are_told_and_can_be_read_apart(tmp_path: Path) -> None:
    times = [(T0 + STEP * at, 50.0) for at in range(20)]
    samples = {
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-{each}",Hostname="n1",cluster="{each}"}}': times
        for each in ("east", "west")
    }
    asked = ASKED._replace(cluster="", until_s=T0 + 600)
    one = asked._replace(kind_options={"selector": 'cluster="east"'})
    try:
        with prometheus(tmp_path, samples) as running:
            _, _, notes = _read(prometheus_source.open_source(running.url, asked))
            alone, _, quiet = _read(prometheus_source.open_source(running.url, one))
    except FileNotFoundError as missing:
        pytest.skip(f"needs Debian's {missing}")
    assert any("holds the clusters east, west" in each for each in notes)
    assert quiet == []
    assert set(alone["gpus"]["uuid"].to_pylist()) == {"GPU-east"}
    assert set(alone["gpu_samples"]["cluster"].to_pylist()) == {"east"}


def test_a_second_ingest_into_the_store_brings_nothing_new(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("duckdb", reason="needs the extra fleet")
    with FleetStore(tmp_path / "store", create=True) as store:
        first = ingest(store, open_source(server.url, ASKED))
        on = ingest(store, open_source(server.url, ASKED))
        again = ingest(store, open_source(server.url, ASKED), from_start=True)
        assert first.tables["gpu_samples"].new == store.read_table("gpu_samples").num_rows > 1000
    for later in (on, again):
        assert (later.total.new, later.total.updates) == (0, 0)


def test_as_far_back_as_there_is_anything(server: Server, tables: Tables) -> None:
    asked = ASKED._replace(
        since_s=None, until_s=T0 + 3600 * HOURS + 5 * 86400, sample_step_s=3600.0
    )
    found, _, _ = _read(prometheus_source.open_source(server.url, asked))
    assert pc.min(found["gpu_samples"]["time_s"]).as_py() == T0
    assert set(found["gpu_samples"]["node"].to_pylist()) == {"n1", "n2", "n3", "n4"}


def test_a_server_that_is_killed_mid_query_is_asked_again_and_told_of(
    server: Server, tables: Tables
) -> None:
    found = prometheus_source.open_source(server.url, ASKED)
    assert isinstance(found, PrometheusSource)
    parts: list[pa.Table] = []
    notes: list[str] = []
    back: threading.Timer | None = None
    for number, batch in enumerate(found.read_batches()):
        notes += batch.notes
        if batch.table == "gpu_samples":
            parts.append(batch.rows)
        if number == 0:  # the slice is half read
            server.kill()
            back = threading.Timer(1.0, server.begin)
            back.start()
    assert back is not None
    back.join()
    assert pa.concat_tables(parts).equals(tables["gpu_samples"])
    assert any("dropped out" in each and "asked again" in each for each in notes), notes


@pytest.fixture(scope="module", params=[prometheus, victoria_metrics])
def pods(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    try:
        with request.param(tmp_path_factory.mktemp("pods"), planted_pods()) as running:
            yield running
    except FileNotFoundError as missing:
        pytest.skip(f"needs Debian's {missing}")


def test_pods_with_gpus_are_jobs_and_restarts_are_attempts(pods: Server) -> None:
    tables, _, _ = _read(prometheus_source.open_source(pods.url, ASKED))
    jobs = tables["jobs"].sort_by([("job", "ascending"), ("attempt", "ascending")])
    own = jobs.filter(pc.field("job") != "ml/rank-0")
    assert own["job"].to_pylist() == ["ml/train-0", "ml/train-0", "ml/worker-0"]
    assert own["attempt"].to_pylist() == [0, 1, 0]
    assert own["name"].to_pylist() == ["train", "train", "worker"]
    assert own["state"].to_pylist() == ["out_of_memory", "completed", "cancelled"]
    assert _minutes(own["start_s"]) == [-5, 30, -5]
    assert _minutes(own["end_s"]) == [30, 60, pytest.approx(80, abs=1)]
    again = jobs.filter(pc.field("job") == "ml/rank-0")
    assert again["attempt"].to_pylist() == [0, 1]
    assert again["state"].to_pylist() == ["cancelled", "running"]
    assert _minutes(again["start_s"]) == [-5, 50]
    assert set(jobs["gpus"].to_pylist()) == {4}
    assert set(jobs["user"].to_pylist()) == {"ann"}
    assert set(jobs["cpus"].to_pylist()) == {16}
    assert jobs["nodes"].to_pylist() == [["k1"]] * 5


def test_cordons_and_conditions_are_states_of_nodes(pods: Server) -> None:
    tables, _, _ = _read(prometheus_source.open_source(pods.url, ASKED))
    nodes = tables["nodes"].sort_by("since_s")
    assert nodes["state"].to_pylist() == ["up", "draining", "up", "down"]
    assert _minutes(nodes["since_s"]) == [0, 20, 40, 100]
    assert _minutes(nodes["until_s"]) == [20, 40, 100, None]
    assert set(nodes["gpus"].to_pylist()) == {8}


def test_states_of_nodes_go_on_from_one_reading_to_the_next(pods: Server) -> None:
    first, cursor, _ = _read(
        prometheus_source.open_source(pods.url, ASKED._replace(until_s=T0 + 50 * 60))
    )
    second, _, _ = _read(prometheus_source.open_source(pods.url, ASKED), cursor)
    whole, _, _ = _read(prometheus_source.open_source(pods.url, ASKED))
    newest = {
        row["since_s"]: row["state"]
        for part in (first, second)
        for row in part["nodes"].to_pylist()
    }
    assert newest == {row["since_s"]: row["state"] for row in whole["nodes"].to_pylist()}
    jobs = {(row["job"], row["attempt"]): (row["state"], row["start_s"], row["end_s"])
            for part in (first, second) for row in part["jobs"].to_pylist()}  # fmt: skip
    assert jobs == {(row["job"], row["attempt"]): (row["state"], row["start_s"], row["end_s"])
                    for row in whole["jobs"].to_pylist()}  # fmt: skip


def _scrapes(client: PrometheusClient, metric: str = "mw_job_step_seconds_total") -> int:
    found = client.query_instant(f"{metric}[5m]", time.time())
    return max((len(each.time_s) for each in found), default=0)


def test_a_real_prometheus_scrapes_our_exporter_and_its_steps_come_back_as_progress(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = run / "metrics.jsonl"
    rows.write_text('{"step": 1, "step_s": 0.2}\n')
    page = serve_metrics(ExporterCollector([JobFolder(run, "71")], "n1"), port=0)
    try:
        with scraping(tmp_path, page.port) as server:
            began, step = time.time(), 1
            client = PrometheusClient(server.url)
            # Targets are found some seconds after the start; half of each step waits for data.
            while _scrapes(client) < 5:
                assert time.time() < began + 60
                step += 1
                with rows.open("a") as file:
                    file.write(f'{{"step": {step}, "step_s": 0.2, "data_wait_fraction": 0.5}}\n')
                time.sleep(0.2)
            client.close()
            now = time.time()
            asked = SourceOptions(
                cluster="c", since_s=began - 400, until_s=now + 300, sample_step_s=300
            )
            tables, _, _ = _read(
                prometheus_source.open_source(
                    server.url, asked._replace(kind_options={"settle_s": "0"})
                )
            )
    except FileNotFoundError as missing:
        pytest.skip(f"needs Debian's {missing}")
    finally:
        page.close()
    spent = dict.fromkeys(("productive", "data_wait"), 0.0)
    for row in tables["progress"].to_pylist():
        assert row["job"] == "71"
        spent[row["phase"]] += row["end_s"] - row["start_s"]
    # Prometheus guesses how counters went before it first saw them, which so short a time shows.
    assert spent["data_wait"] / sum(spent.values()) == pytest.approx(0.5, abs=0.1)


def test_a_real_node_exporter_ends_in_samples_of_this_machine(tmp_path: Path) -> None:
    program = shutil.which("prometheus-node-exporter")
    if program is None:
        pytest.skip("needs Debian's prometheus-node-exporter")
    port = free_port()
    exporter = subprocess.Popen(
        [program, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    )
    try:
        with scraping(tmp_path, port) as server:
            client, began = PrometheusClient(server.url), time.time()
            while _scrapes(client, "node_cpu_seconds_total") < 6:
                assert time.time() < began + 60
                time.sleep(0.5)
            client.close()
            asked = SourceOptions(cluster="c", since_s=began, until_s=time.time(), sample_step_s=1)
            tables, _, _ = _read(prometheus_source.open_source(server.url, asked))
    except FileNotFoundError as missing:
        pytest.skip(f"needs Debian's {missing}")
    finally:
        exporter.kill()
        exporter.wait()
    rows = tables["node_samples"].to_pylist()
    assert {row["node"] for row in rows} == {socket.gethostname()}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert {row["memory_total"] for row in rows} == {memory}
    busy = [row["cpu_util"] for row in rows if row["cpu_util"] is not None]
    assert busy
    assert all(0 <= each <= 1 for each in busy)
    assert all(0 < row["memory_used"] < memory for row in rows)


def test_a_value_of_any_characters_is_asked_for_alone(tmp_path: Path) -> None:
    values = ['a"b', "a\\b", "^a$", "a.b", "axb", "a|b", "[^a]", '"} or up{a="', "a\nb", "🙂"]
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    samples = {
        f'mw_thing{{UUID="{value.translate(escapes)}"}}': [(T0 + 60.0 * at, float(number))
                                                          for at in range(3)]
        for number, value in enumerate(values)
    }  # fmt: skip
    if shutil.which("prometheus") is None:
        pytest.skip("needs Debian's prometheus")
    with (
        prometheus(tmp_path, samples) as running,
        contextlib.closing(PrometheusClient(running.url)) as client,
    ):
        for value in values:
            for matcher in (match_value("UUID", value), match_any("UUID", [value])):
                found = client.query_instant(f"mw_thing{{{matcher}}}", T0 + 120.0)
                assert [one.labels["UUID"] for one in found] == [value]
        everything = match_any("UUID", values)
        assert len(client.query_instant(f"mw_thing{{{everything}}}", T0 + 120.0)) == len(values)
