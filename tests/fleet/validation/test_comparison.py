"""Published statistics beside ours."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.public_traces.public_trace_source import open_source
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.validation import compare_statistics, compute_statistics
from meshwright.fleet.validation.comparison import agrees, flatten_numbers
from meshwright.fleet.validation.job_summary import merge_attempts, summarize_jobs
from meshwright.fleet.validation.reliability import derive_reliability
from meshwright.predict.job_queue import SCORERS

_JOB = "job_id,user,node_num,gpu_num,cpu_num"
_TIMES = "submit_time,start_time,end_time"
_DAY = "2023-05-17 11:0"
KALOS = (
    f"{_JOB},mem_per_pod_GB,type,state,{_TIMES},duration,queue,gpu_time\n"
    f"a,u,8,64,9,10,Pretrain,FAILED,{_DAY}0:00+00:00,{_DAY}0:10+00:00,{_DAY}0:18+00:00,18,10,1152\n"
    f"b,u,1,8,9,10,Eval,COMPLETED,{_DAY}0:00+00:00,{_DAY}0:00+00:00,{_DAY}0:42+00:00,42,0,336\n"
    f"c,u,1,0,9,10,Other,COMPLETED,{_DAY}0:00+00:00,{_DAY}0:00+00:00,{_DAY}0:05+00:00,5,0,0\n"
)
PHILLY = [
    {
        "status": "Pass",
        "vc": "v",
        "jobid": "j",
        "attempts": [
            {
                "start_time": "2017-10-07 01:00:00",
                "end_time": "2017-10-07 01:10:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
            },
            {
                "start_time": "2017-10-07 01:20:00",
                "end_time": "2017-10-07 02:00:00",
                "detail": [{"ip": "m2", "gpus": ["gpu0"]}],
            },
        ],
        "submitted_time": "2017-10-07 00:59:00",
        "user": "u",
    },
    {"status": "Killed", "vc": "v", "jobid": "k", "attempts": [], "submitted_time": None},
]


def test_a_list_of_jobs_is_summarised_by_its_own_columns(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(KALOS, encoding="utf-8")
    made = compute_statistics(tmp_path)
    found = {
        name.rpartition(".")[2]: figure.value
        for name, figure in made.items()
        if name.startswith("acme.cluster_summary_published.Kalos.")
    }
    assert (found["job_num"], found["gpu_job_num"], found["cpu_job_num"]) == (3, 2, 1)
    # Kalos counts durations from submission, and so do the figures that were published of it.
    assert found["avg_run_time_gpu"] == 30
    assert found["fail_gpu_time"] == 18 * 64
    assert found["complete_rate_gpu_time"] == pytest.approx(336 / 1488)
    share = made["acme.fig4_shares_from_repo_pdf.kalos_gpu_time_pct.Pretrain"]
    assert share.value == pytest.approx(100 * 1152 / 1488)
    assert made["acme.kalos_all_job_states_thirdparty.COMPLETED"].value == 2


def test_philly_runs_from_its_first_start_to_its_last_end(tmp_path: Path) -> None:
    (tmp_path / "cluster_job_log").write_text(json.dumps(PHILLY), encoding="utf-8")
    made = compute_statistics(tmp_path)
    path = "philly.published_row"
    assert made[f"{path}.job_num"].value == 1, "the other never ran"
    assert made[f"{path}.avg_run_time_gpu"].value == 3600
    assert made[f"{path}.avg_que_time_gpu"].value == 60
    assert made[f"{path}.avg_gpu_num"].value == 2


def test_pai_counts_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text(
        "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
        "j,worker,2.0,Terminated,100.0,500.0,600.0,2.0,50.0,T4\n"
        "j,ps,1.0,Terminated,100.0,500.0,600.0,2.0,,\n",
        encoding="utf-8",
    )
    (tmp_path / "instances.csv").write_text(
        "job_name,task_name,inst_name,worker_name,inst_id,status,start_time,end_time,machine\n"
        "j,worker,a,a,i,Terminated,110.0,210.0,m\nj,worker,b,b,i,Terminated,130.0,430.0,m\n"
        "j,ps,c,c,i,Terminated,110.0,430.0,m\n",
        encoding="utf-8",
    )
    made = compute_statistics(tmp_path)
    path = "alibaba_v2020.pai_published_row"
    assert (made[f"{path}.job_num"].value, made[f"{path}.gpu_job_num"].value) == (2, 1)
    assert made[f"{path}.avg_run_time_gpu"].value == 200
    assert made[f"{path}.avg_que_time_gpu"].value == 10
    assert made[f"{path}.avg_gpu_num"].value == 0.5


def test_what_a_trace_says_counts_before_what_a_table_implies(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(KALOS, encoding="utf-8")
    (tmp_path / "summary.csv").write_text(
        "id,job_num,gpu_job_num,avg_run_time_gpu\nKalos,62413,19907,1259.689\n", encoding="utf-8"
    )
    name = "acme.cluster_summary_published.Kalos.cpu_job_num"
    assert compute_statistics(tmp_path)[name].value == 1
    (tmp_path / "jobs.csv").unlink()
    assert compute_statistics(tmp_path)[name].value == 42506


def test_figures_agree_within_a_per_cent_or_as_printed() -> None:
    assert agrees(100.9, 100)
    assert not agrees(101.1, 100)
    assert agrees(0.0796, 0.08)
    assert agrees(0.2254, 0.23), "printed to two digits"
    assert not agrees(0.2249, 0.23)
    assert not agrees(1, 0)
    assert agrees(0, 0)


def test_numbers_of_a_document_go_by_their_paths() -> None:
    document = {"a": {"b": 1, "c": [{"vc": "x", "n": 2}, 3]}, "told": True, "words": "none"}
    assert dict(flatten_numbers(document)) == {"a.b": 1, "a.c.x.n": 2, "a.c.1": 3}


def test_closed_forms_follow_from_counts() -> None:
    made = derive_reliability(
        {
            "llama3_54d": {"gpus": 16384, "days": 54, "unexpected": 419, "planned": 47},
            "meta_rsc": {
                "failures_per_1000_node_days": {"RSC1": 6.5},
                "mttf_h": {"1024 GPUs (measured)": 7.9, "16384 (projected)": 1.8},
            },
        }
    )
    assert made["reliability.llama3_54d.per_gpu_mtbf_h"].value == pytest.approx(50677, rel=1e-4)
    assert made["reliability.llama3_54d.interruptions_total"].value == 466
    assert made["reliability.meta_rsc.mttf_h.16384 (projected)"].value == pytest.approx(1.803, 1e-3)
    assert "measured" in made["reliability.meta_rsc.mttf_h.1024 GPUs (measured)"].caveat.reason


def test_files_that_are_no_figures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[", encoding="utf-8")
    with pytest.raises(InputError, match="no JSON"):
        compare_statistics(tmp_path / "x.json", tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        compare_statistics(tmp_path / "missing.json", tmp_path)
    with pytest.raises(InputError, match="no such file"):
        compare_statistics(None, tmp_path / "nowhere")


def _facts(shared: Path) -> Path:
    path = shared / "validation" / "fleet_facts.json"
    if not path.exists() or not (shared / "fleet_traces").is_dir():
        pytest.skip("needs ../shared/fleet_traces and ../shared/validation/fleet_facts.json")
    return path


@pytest.mark.parametrize(
    ("folder", "prefix", "least"),
    [
        ("alibaba_v2026_spot", "alibaba_v2026_spot.", 8),
        ("philly", "philly.philly_", 19),
        pytest.param("helios", "helios.earth_vc", 80, marks=pytest.mark.slow),
        ("acme", "acme.util_quantiles", 247),
        ("alibaba_v2023", "alibaba_v2023.facts.", 20),
        ("muri", "muri.physical", 48),
    ],
)
def test_shared_traces_give_what_was_published(
    shared: Path, folder: str, prefix: str, least: int
) -> None:
    rows = compare_statistics(_facts(shared), shared / "fleet_traces" / folder)
    mine = [row for row in rows if row.name.startswith(prefix)]
    assert [row.name for row in mine if row.agrees is not True] == []
    assert len(mine) >= least


@pytest.mark.parametrize(
    ("folder", "gpu_hours"), [("philly", 978_078.47), ("alibaba_v2026_genai", 2_568.705)]
)
def test_the_tables_hold_the_same_gpu_hours(shared: Path, folder: str, gpu_hours: float) -> None:
    _facts(shared)
    batches = open_source(str(shared / "fleet_traces" / folder), SourceOptions()).read_batches()
    jobs = pa.concat_tables([batch.rows for batch in batches if batch.table == "jobs"])
    assert summarize_jobs(merge_attempts(jobs))["gpu_hours"] == pytest.approx(gpu_hours, rel=1e-6)


MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
    "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
    "0,64,0,1,gpt2,4,100000,1,1,1,1,1,0\n"
    "1,32,10000,1,gpt2,4,50000,1,1,1,1,1,0\n"
    "2,64,20000,1,gpt2,4,10000,1,1,1,1,1,0\n"
    "3,32,30000,1,gpt2,4,60000,1,1,1,1,1,0\n"
)


def test_workloads_are_taken_through_the_queue_when_asked(tmp_path: Path) -> None:
    (tmp_path / "sim_trace9.csv").write_text(MURI, encoding="utf-8")
    path = "muri.reference_replay_ours.results.trace9"
    assert f"{path}.fifo_hol.avg_jct_s" not in compute_statistics(tmp_path)
    made = compute_statistics(tmp_path, simulated=True)
    ends = {"fifo_hol": (100, 150, 160, 220), "fifo_skip": (100, 150, 170, 160)}
    for policy, times in ends.items():
        mean = sum(end - submit for end, submit in zip(times, (0, 10, 20, 30), strict=True)) / 4
        assert made[f"{path}.{policy}.avg_jct_s"].value == pytest.approx(mean)
        assert made[f"{path}.{policy}.makespan_s"].value == max(times)
    # The short job stops the long one.
    assert made[f"{path}.srtf_preempt.makespan_s"].value < 220
    assert "places jobs on nodes" in (
        made["muri.simulator_upstream_run_here.results.trace9.shortest.avg_jct_s"].caveat.reason
    )


def test_a_cluster_is_filled_when_asked(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(
        "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,T4\nn1,64000,262144,0,\n",
        encoding="utf-8",
    )
    (tmp_path / "pods_default.csv").write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
        "p0,4000,1024,1,1000,\np1,4000,1024,1,500,T4\n",
        encoding="utf-8",
    )
    made = compute_statistics(tmp_path, simulated=True)
    shares = [made[f"alibaba_v2023.packed.{name}"].value for name in SCORERS]
    assert min(shares) >= 75
    assert max(shares) <= 100


@pytest.mark.slow
def test_the_reference_replay_is_repeated(shared: Path) -> None:
    facts = _facts(shared)
    rows = compare_statistics(
        facts, shared / "fleet_traces" / "muri" / "sim_trace3.csv.gz", simulated=True
    )
    mine = [row for row in rows if ".results.trace3." in row.name and "replay" in row.name]
    assert [row.name for row in mine if row.agrees is not True] == []
    apart = [abs(row.difference or 0) for row in mine if row.name.endswith("jct_s")]
    assert max(apart) < 1e-6
    assert len(mine) >= 40


@pytest.mark.slow
def test_idle_pods_and_slow_workers_are_found_as_defined(shared: Path) -> None:
    _facts(shared)
    traces = shared / "fleet_traces"
    idle = compute_statistics(traces / "alibaba_v2026_genai")
    path = "alibaba_v2026_genai.idle_held"
    assert idle[f"{path}.idle_windows_ge30min"].value == 649
    assert idle[f"{path}.idle_hours_in_windows_ge30min"].value == pytest.approx(777.369, rel=1e-5)
    slow = compute_statistics(traces / "alibaba_v2020")
    changes = "alibaba_v2020.minibatch_stragglers.changes"
    assert slow[f"{changes}.job_1.windows"].value == 1
    assert slow[f"{changes}.job_1.worker"].value == 6
    assert slow[f"{changes}.job_2.windows"].value == 0


@pytest.mark.slow
def test_no_figure_differs_without_a_reason(shared: Path) -> None:
    rows = compare_statistics(_facts(shared), shared / "fleet_traces")
    judged = [row for row in rows if row.agrees is not None]
    assert [row.name for row in rows if row.agrees is not True and not row.reason] == []
    assert sum(row.agrees is True for row in judged) >= 0.99 * len(judged)
    assert len(judged) >= 1000
