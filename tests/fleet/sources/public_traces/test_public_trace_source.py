"""Public traces, read from small made-up files in their forms."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.fleet.sources.public_traces.public_trace_source import matches, open_source
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.tables import TABLE_SCHEMAS

_JOB = "user,node_num,gpu_num,cpu_num"
_TIMES = "submit_time,start_time,end_time"
_DAY = "2023-03-01 00:0"
SEREN = f"""job_id,{_JOB},type,state,{_TIMES},duration,queue,gpu_time
11,u1,1,8,128,Other,FAILED,{_DAY}0:10+08:00,{_DAY}0:40+08:00,{_DAY}1:40+08:00,60,30,480.0
12,u2,2,0,16,Eval,COMPLETED,{_DAY}0:10+08:00,{_DAY}0:10+08:00,{_DAY}0:20+08:00,10,0,0.0
13,u2,1,1,16,Eval,NODE_FAIL,{_DAY}0:10+08:00,,,,,
"""
_HOUR = "2023-05-17 11:0"
KALOS = (
    f"job_id,{_JOB},mem_per_pod_GB,shared_mem_per_pod,type,state,{_TIMES},"
    "fail_time,stop_time,duration,queue,gpu_time\n"
    "dlc1,u1,2,16,96,1000,100.0,Pretrain,CANCELLED,"
    f"{_HOUR}0:00+00:00,{_HOUR}0:10+00:00,{_HOUR}1:10+00:00,,,70,10.0,1120.0\n"
)
HELIOS = f"""job_id,user,vc,gpu_num,cpu_num,node_num,state,{_TIMES},duration,queue
7,uA,vcX,4,16,1,TIMEOUT,2020-06-09 18:00:00,2020-06-09 18:00:05,2020-06-09 19:00:05,3600,5
"""
PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1_1",
        "attempts": [
            {
                "start_time": "2017-10-07 01:00:00",
                "end_time": "2017-10-07 01:10:00",
                "detail": [{"ip": "m47", "gpus": ["gpu0", "gpu1"]}],
            },
            {
                "start_time": "2017-10-07 01:20:00",
                "end_time": "2017-10-07 02:20:00",
                "detail": [{"ip": "m1", "gpus": ["gpu6"]}, {"ip": "m2", "gpus": ["gpu7"]}],
            },
        ],
        "submitted_time": "2017-10-07 00:59:00",
        "user": "u",
    },
    {"status": "Killed", "vc": "v", "jobid": "a_2", "attempts": [], "submitted_time": None},
    {
        "status": "Failed",
        "vc": "v",
        "jobid": "a_3",
        "attempts": [{"start_time": "2017-10-07 01:00:00", "end_time": None, "detail": []}],
        "submitted_time": "2017-10-07 00:59:00",
        "user": "w",
    },
]


EVERYTHING = SourceOptions()


def read(where: Path, asked: SourceOptions = EVERYTHING) -> dict[str, pa.Table]:
    """Read a trace whole, each table in its schema."""
    found: dict[str, list[pa.Table]] = {}
    for batch in open_source(str(where), asked).read_batches():
        assert batch.rows.schema == TABLE_SCHEMAS[batch.table]
        found.setdefault(batch.table, []).append(batch.rows)
    return {name: pa.concat_tables(tables) for name, tables in found.items()}


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_acme_is_told_by_its_columns_not_by_its_name(tmp_path: Path) -> None:
    jobs = read(written(tmp_path / "anything.txt", SEREN))["jobs"].to_pylist()
    assert [job["cluster"] for job in jobs] == ["Seren"] * 3
    first, second, third = jobs
    assert first["state"] == "failed"
    assert first["start_s"] - first["submit_s"] == 30
    assert first["end_s"] - first["start_s"] == 60
    assert first["submit_s"] == 1677600010.0
    assert (first["gpus"], first["num_nodes"], first["workload"]) == (8, 1, "Other")
    assert second["gpus"] == 0
    assert (third["start_s"], third["state"]) == (None, "node_fail")


def test_kalos_tells_memory_and_is_another_cluster(tmp_path: Path) -> None:
    (job,) = read(written(tmp_path / "trace.csv", KALOS))["jobs"].to_pylist()
    assert (job["cluster"], job["state"], job["gpus"]) == ("Kalos", "cancelled", 16)
    assert job["memory_requested"] == 2000 * 2**30
    assert job["end_s"] - job["start_s"] == 60


def test_helios_is_named_by_its_folder_and_lies_in_china(tmp_path: Path) -> None:
    written(tmp_path / "Venus" / "cluster_log.csv", HELIOS)
    written(
        tmp_path / "Venus" / "cluster_gpu_number.csv",
        "date,vcX,vcY,total\n2020-04-01,8,0,8\n2020-04-02,8,16,24\n2020-04-03,16,16,32\n",
    )
    found = read(tmp_path)
    (job,) = found["jobs"].to_pylist()
    assert (job["cluster"], job["partition"], job["state"]) == ("Venus", "vcX", "timeout")
    assert job["start_s"] == 1591696805.0
    nodes = [(row["node"], row["gpus"], row["until_s"] - row["since_s"])
             for row in found["nodes"].to_pylist()]  # fmt: skip
    assert nodes == [("vcX", 8, 2 * 86400), ("vcX", 16, 86400), ("vcY", 16, 2 * 86400)]


def test_philly_tells_attempts_and_which_gpus_they_held(tmp_path: Path) -> None:
    found = read(written(tmp_path / "cluster_job_log", json.dumps(PHILLY)))
    jobs = found["jobs"].to_pylist()
    shown = [(job["job"], job["attempt"], job["state"], job["gpus"]) for job in jobs]
    assert shown == [
        ("application_1_1", 0, "requeued", 2),
        ("application_1_1", 1, "completed", 2),
        ("a_2", 0, "cancelled", None),
        ("a_3", 0, "running", None),
    ]
    assert jobs[1]["nodes"] == ["m1", "m2"]
    assert jobs[0]["start_s"] == 1507363200.0, "Pacific daylight time"
    held = [(row["attempt"], row["node"], row["gpu"]) for row in found["allocations"].to_pylist()]
    assert held == [(0, "m47", 0), (0, "m47", 1), (1, "m1", 6), (1, "m2", 7)]


def test_philly_samples_end_in_a_comma_and_miss_gpus(tmp_path: Path) -> None:
    written(
        tmp_path / "cluster_gpu_util",
        "time,machineId,gpu0_util,gpu1_util\n"
        "2017-11-05 00:08:00 PDT,m29,60.8,NA,\n2017-11-05 00:08:00 PST,m29,0.0,100.0,\n",
    )
    written(
        tmp_path / "cluster_mem_util",
        "time,machine_id,mem_total,mem_free\n2017-10-03 00:06:00 PDT,m29,2000.0,500.0\n",
    )
    written(
        tmp_path / "cluster_machine_list", "machineId,number of GPUs, single GPU mem\nm31,8, 24GB\n"
    )
    found = read(tmp_path)
    samples = (
        found["gpu_samples"].sort_by([("time_s", "ascending"), ("gpu", "ascending")]).to_pylist()
    )
    assert [(row["gpu"], round(row["gpu_util"], 3)) for row in samples] == [
        (0, 0.608), (0, 0.0), (1, 1.0),
    ]  # fmt: skip
    assert samples[1]["time_s"] - samples[0]["time_s"] == 3600
    assert found["node_samples"]["memory_used"].to_pylist() == [1500 * 1024]
    assert found["nodes"].select(["node", "gpus", "gpu_kind"]).to_pylist() == [
        {"node": "m31", "gpus": 8, "gpu_kind": "24 GB"}
    ]


def _pai(folder: Path, headers: bool) -> None:
    tables = {
        "pai_job_table": ("job_name,inst_id,user,status,start_time,end_time",
                          "4b3f,8cb3,585f,Terminated,1000.0,1600.0\n4b40,8cb4,585f,Failed,1000.0,0\n"),
        "pai_task_table": (
            "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type",
            "4b3f,worker,2.0,Terminated,1100.0,1600.0,600.0,2.0,50.0,T4\n"
            "4b3f,ps,1.0,Terminated,1090.0,1600.0,100.0,1.0,,\n"
            "4b40,worker,1.0,Failed,0,0,600.0,2.0,100.0,V100\n",
        ),
        "pai_instance_table": (
            "job_name,task_name,inst_name,worker_name,inst_id,status,start_time,end_time,machine",
            "4b3f,worker,i0,w0,8cb3,Terminated,1100.0,1600.0,aa11\n"
            "4b3f,worker,i1,w1,8cb3,Terminated,1100.0,1600.0,aa11\n"
            "4b3f,ps,i2,w2,8cb3,Terminated,1090.0,1600.0,bb22\n",
        ),
        "pai_group_tag_table": (
            "inst_id,user,gpu_type_spec,group,workload",
            "8cb3,585f,,fbeb,bert\n8cb4,585f,T4,fbec,\n",
        ),
        "pai_sensor_table": (
            "job_name,task_name,worker_name,inst_id,machine,gpu_name,cpu_usage,gpu_wrk_util,avg_mem,"
            "max_mem,avg_gpu_wrk_mem,max_gpu_wrk_mem,read,write,read_count,write_count",
            "4b3f,worker,w0,8cb3,aa11,/dev/nvidia0,140.0,20.0,1.0,2.0,1.0,2.0,1.0,1.0,1.0,1.0\n"
            "4b3f,worker,w1,8cb3,aa11,/dev/nvidia1,140.0,10.0,1.0,2.0,1.0,3.0,1.0,1.0,1.0,1.0\n",
        ),
        "pai_machine_spec": ("machine,gpu_type,cap_cpu,cap_mem,cap_gpu", "aa11,T4,96,512,2\n"),
    }  # fmt: skip
    for name, (header, body) in tables.items():
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
            for member, text in ((f"._{name}.csv", "junk"), (f"{name}.csv", body)):
                info = tarfile.TarInfo(member)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
        if headers:
            written(folder / f"{name}.header", header)


@pytest.mark.parametrize("headers", [True, False])
def test_pai_is_put_together_from_tasks_and_instances(tmp_path: Path, headers: bool) -> None:
    _pai(tmp_path, headers)
    found = read(tmp_path)
    first, second = found["jobs"].sort_by("job").to_pylist()
    assert (first["gpus"], first["cpus"], first["state"]) == (1.0, 13.0, "completed")
    assert (first["submit_s"], first["start_s"], first["end_s"]) == (1000, 1090, 1600)
    assert (first["workload"], second["workload"]) == ("bert", None)
    assert first["gpu_util"] == pytest.approx(0.3)
    assert (first["gpu_memory_peak"], first["memory_peak"]) == (5 * 2**30, 4 * 2**30)
    assert second["gpu_util"] is None
    assert (second["start_s"], second["end_s"], second["gpu_kind"]) == (None, None, "V100")
    (held,) = found["allocations"].to_pylist()
    assert (held["node"], held["gpu_fraction"], held["gpu"]) == ("aa11", 1.0, None)
    assert found["nodes"]["gpus"].to_pylist() == [2]


def test_an_archive_of_pods_gives_samples_and_jobs(tmp_path: Path) -> None:
    body = "value,timestamp_anon,container_ip\n0.0,100.0,p\n50.0,160.0,p\n99.0,100.0,q\n"
    with tarfile.open(tmp_path / "pod_gpu_duty_cycle_anon.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("pod_gpu_duty_cycle_anon.csv")
        info.size = len(body)
        archive.addfile(info, io.BytesIO(body.encode()))
    found = read(tmp_path, SourceOptions(cluster="images"))
    assert [round(value, 2) for value in found["gpu_samples"]["gpu_util"].to_pylist()] == [
        0,
        0.5,
        0.99,
    ]
    (pod, other) = found["jobs"].to_pylist()
    assert (pod["job"], pod["start_s"], pod["end_s"], pod["cluster"]) == ("p", 100, 160, "images")
    assert other["end_s"] == 100


def test_workloads_of_one_folder_are_kept_apart(tmp_path: Path) -> None:
    header = (
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
        "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
    )
    for name in ("one.csv.gz", "two.csv.gz"):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(header + "0,8,2000,10956,gpt2,4,5095000,91000,437,0.6,419,49,0\n")
    jobs = read(tmp_path)["jobs"].to_pylist()
    assert {job["cluster"].split("/")[1] for job in jobs} == {"one", "two"}
    assert (jobs[0]["submit_s"], jobs[0]["end_s"] - jobs[0]["start_s"]) == (2, 5095)
    assert jobs[0]["reason"] == "its wait is not told"


def test_ports_carry_bytes_by_the_second(tmp_path: Path) -> None:
    row = "2024/05/24 星期五 00:00:00.914,{},leaf,port{},0,{},0,{},0,0\n"
    text = "SaveTime,SaveTimeUTC,DeviceName,PortName,InPkts,InOctets,OutPkts,OutOctets,"
    text += "InRatio,OutRatio\n"
    text += row.format(1000, 1, 0, 0) + row.format(1500, 1, 100, 50) + row.format(1000, 2, 7, 7)
    (sample,) = read(written(tmp_path / "p.csv", text))["node_samples"].to_pylist()
    assert (sample["node"], sample["net_tx"], sample["net_rx"]) == ("leaf port1", 200, 100)


def test_metrics_side_by_side(tmp_path: Path) -> None:
    text = "Time,10.0.0.1-0,10.0.0.1-1,10.0.0.2-0\n2023-07-01 08:00:00+08:00,50,,100\n"
    found = read(written(tmp_path / "seren" / "GPU_UTIL.csv", text))["gpu_samples"].to_pylist()
    assert [(row["node"], row["gpu"], row["gpu_util"]) for row in found] == [
        ("10.0.0.1", 0, 0.5), ("10.0.0.2", 0, 1.0),
    ]  # fmt: skip
    assert found[0]["cluster"] == "seren"


def test_reading_goes_on_behind_a_cursor(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", SEREN)
    written(tmp_path / "b.csv", KALOS)
    first, second = open_source(str(tmp_path), SourceOptions()).read_batches()
    assert first.cursor != second.cursor
    (again,) = open_source(str(tmp_path), SourceOptions()).read_batches(first.cursor)
    assert again.rows.equals(second.rows)
    assert list(open_source(str(tmp_path), SourceOptions()).read_batches(second.cursor)) == []


def test_only_the_time_that_is_asked_for_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", SEREN)
    assert read(path, SourceOptions(until_s=1677600010.0))["jobs"].num_rows == 0
    jobs = read(path, SourceOptions(since_s=1677600050.0))["jobs"]
    assert jobs["job"].to_pylist() == ["11", "13"]


def test_other_files_are_not_claimed(tmp_path: Path) -> None:
    assert not matches(str(written(tmp_path / "x.csv", "a,b\n1,2\n")))
    assert not matches(str(tmp_path / "missing"))
    assert not matches("http://prometheus:9090")
    with pytest.raises(InputError, match="no public trace"):
        open_source(str(tmp_path), SourceOptions())


def test_statistics_are_no_telemetry(tmp_path: Path) -> None:
    written(tmp_path / "s.csv", "id,job_num,gpu_job_num,avg_run_time_gpu\nSeren,1,1,1\n")
    with pytest.raises(InputError, match="mw validate fleet"):
        open_source(str(tmp_path), SourceOptions())


def test_a_file_that_breaks_off_is_told(tmp_path: Path) -> None:
    whole = gzip.compress((SEREN + SEREN[SEREN.index("\n") + 1 :] * 4000).encode())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFile, match="cannot read"):
        read(path)


def test_a_zip_names_clusters_by_its_folders(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/Venus/cluster_log.csv", HELIOS)
        archive.writestr("data/Earth/cluster_log.csv", HELIOS)
        archive.writestr("__MACOSX/data/._x", "junk")
    jobs = read(tmp_path / "data.zip")["jobs"].to_pylist()
    assert sorted(job["cluster"] for job in jobs) == ["Earth", "Venus"]
    assert {job["end_s"] - job["start_s"] for job in jobs} == {3600}


@pytest.mark.parametrize("typed", [True, False])
def test_parquet_is_read_like_text(tmp_path: Path, typed: bool) -> None:
    table = pyarrow.csv.read_csv(io.BytesIO(SEREN.encode()))
    if not typed:
        table = table.cast(pa.schema([(name, pa.string()) for name in table.column_names]))
    path = tmp_path / "trace.parquet"
    pyarrow.parquet.write_table(table, path)
    plain = read(written(tmp_path / "x" / "trace.csv", SEREN))["jobs"]
    found = read(path)["jobs"]
    assert found.drop(["seen_s"]).equals(plain.drop(["seen_s"]))


def test_the_recorded_workload_belongs_to_its_nodes(tmp_path: Path) -> None:
    pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nopenb-pod-0000,12000,16384,1,460\n"
    written(tmp_path / "openb" / "pod_list_default.csv", pods)
    written(tmp_path / "openb" / "pod_list_cpu050.csv", pods)
    written(tmp_path / "openb" / "nodes.csv", "sn,cpu_milli,memory_mib,gpu,model\nn0,1,2,2,P100\n")
    found = read(tmp_path)
    assert set(found["jobs"]["cluster"].to_pylist()) == {"openb", "openb/pod_list_cpu050"}
    assert found["nodes"]["cluster"].to_pylist() == ["openb"]
    assert found["jobs"]["gpus"].to_pylist() == [0.46, 0.46]


def test_a_list_of_nodes_that_is_part_of_another_is_left_out(tmp_path: Path) -> None:
    head = "sn,cpu_milli,memory_mib,gpu,model\n"
    written(tmp_path / "openb" / "node_list_all_node.csv", f"{head}n0,1,2,0,\nn1,1,2,8,G2\n")
    part = written(tmp_path / "openb" / "node_list_gpu_node.csv", f"{head}n0,1,2,8,G2\n")
    assert read(tmp_path)["nodes"]["gpus"].to_pylist() == [0, 8]
    (batch,) = open_source(str(tmp_path), SourceOptions()).read_batches()
    assert any("node_list_gpu_node.csv left out" in note for note in batch.notes)
    assert read(part)["nodes"]["gpus"].to_pylist() == [8]


def test_tables_that_are_not_read_are_named(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", SEREN)
    written(tmp_path / "odd.csv", "alpha,beta\n1,2\n")
    written(tmp_path / "README.md", "# Jobs, and more\n")
    (batch,) = open_source(str(tmp_path), SourceOptions()).read_batches()
    assert batch.notes[-1] == "left out, as no telemetry can be made of it: odd.csv"
    (batch,) = open_source(str(tmp_path / "a.csv"), SourceOptions()).read_batches()
    assert len(batch.notes) == 1


def test_batches_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.fleet.sources.public_traces.public_trace_source._MOST_ROWS", 2)
    path = written(tmp_path / "a.csv", SEREN)
    batches = list(open_source(str(path), SourceOptions()).read_batches())
    assert [batch.rows.num_rows for batch in batches] == [2, 1]
    assert [batch.cursor is None for batch in batches] == [True, False]
