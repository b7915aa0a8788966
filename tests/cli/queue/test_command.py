"""`mw queue`: jobs through one policy, through several, and into a cluster until it is full."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.policy.job_queue.policy_registry import POLICIES

Captured = pytest.CaptureFixture[str]


def answer(words: list[str], capsys: Captured) -> dict[str, Any]:
    assert main(["queue", *words, "--json"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def faults(words: list[str], capsys: Captured) -> str:
    assert main(["queue", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("error:") == printed.err.count("hint:") > 0
    return printed.err


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    draw, lines, now_s = random.Random(0), [], 1_700_000_000.0
    for at in range(60):
        now_s += draw.randrange(200)
        wait_s, lasts_s = draw.randrange(500), draw.choice((60, 600, 4000))
        start_s = now_s + wait_s
        lines.append(
            f"c,{at},0,train-{at % 4},user{at % 3},team{at % 2},completed,{now_s},{start_s},"
            f"{start_s + lasts_s},{lasts_s * 2},{draw.choice((1, 2, 8))}"
        )
    lines.append(f"c,cpu,0,x,u,team0,completed,{now_s},{now_s},{now_s + 5},,0")
    lines.append(f"c,now,0,x,u,team0,running,{now_s},{now_s},,,8")
    path = tmp_path / "jobs.csv"
    head = (
        "cluster,job,attempt,name,user,team,state,submit_s,start_s,end_s,time_limit_s,gpus,gpu_kind"
    )
    lines = [f"{line},a100,{'high' if at % 5 == 0 else 'low'}" for at, line in enumerate(lines)]
    path.write_text("\n".join([f"{head},qos", *lines]) + "\n")
    return str(path)


def test_one_policy_is_told_in_one_screen(jobs: str, capsys: Captured) -> None:
    assert main(["queue", "simulate", jobs, "--gpus", "16", "--policy", "easy"]) == 0
    printed = capsys.readouterr()
    assert "easy: FIFO with backfill" in printed.out
    assert "their limits" in printed.out
    assert len(printed.out.splitlines()) <= 40
    assert "rows that have no GPUs (1)" in printed.err
    assert "rows that have not both started and ended (1)" in printed.err


def test_the_same_as_data(jobs: str, capsys: Captured) -> None:
    found = answer(["simulate", jobs, "--gpus", "16", "--policy", "easy"], capsys)
    assert found["schema"] == "meshwright.queue.simulate/2"
    assert found["jobs"] == 60
    assert found["runtime_estimate"] == "limit"
    assert found["skipped"] == {
        "have no GPUs": 1, "have not both started and ended": 1,
    }  # fmt: skip
    assert found["jct_s"]["mean"] >= found["wait_s"]["mean"]
    assert sum(one["jobs"] for one in found["by_size"]) == 60


def test_more_gpus_and_less_load_wait_less(jobs: str, capsys: Captured) -> None:
    def wait(*more: str) -> float:
        found = answer(["simulate", jobs, "--policy", "fifo", *more], capsys)
        return float(found["wait_s"]["mean"])

    few = wait("--gpus", "8")
    assert wait("--gpus", "32") < few
    assert wait("--gpus", "8", "--arrival-scale", "0.2") < few
    assert few < wait("--gpus", "8", "--arrival-scale", "3")


@pytest.mark.parametrize("estimate", ["exact", "limit", "predicted"])
def test_policies_are_compared_side_by_side(jobs: str, estimate: str, capsys: Captured) -> None:
    words = ["compare", jobs, "--gpus", "16", "--policies", "all", "--runtime-estimate", estimate]
    words += ["--deadline-factor", "2", "--qos-priorities", "high=10"]
    found = answer(words, capsys)
    by_name = {one["policy"]: one for one in found["runs"]}
    assert set(by_name) == set(POLICIES)
    assert by_name["srsf"]["jct_s"]["mean"] < by_name["fifo"]["jct_s"]["mean"]
    assert all(one["jobs"] == 60 for one in found["runs"])


def test_policies_side_by_side_fit_80_columns(
    jobs: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert (
        main(["queue", "compare", jobs, "--gpus", "16", "--policies", "fifo,conservative,srsf"])
        == 0
    )
    drawn = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, drawn)) <= 80
    assert any("stops" in line for line in drawn)
    assert len(drawn) <= 16


def test_nodes_fail_and_jobs_change_size(jobs: str, capsys: Captured) -> None:
    words = ["simulate", jobs, "--gpus", "16", "--gpus-per-node", "8", "--restore-time", "1m"]
    fails = [
        "--failures-per-node-day", "20", "--checkpoint-interval", "10m", "--checkpoint-time", "30s",
        "--seed", "3",
    ]  # fmt: skip
    found = answer([*words, "--policy", "srtf", *fails], capsys)
    assert found["failures"] > 0
    assert found["lost_gpu_hours"] > 0
    assert found["goodput"] < 1
    grown = answer([*words, "--policy", "elastic", "--elastic-range", "0.5:2"], capsys)
    fixed = answer([*words, "--policy", "fifo-greedy"], capsys)
    assert grown["jct_s"]["mean"] < fixed["jct_s"]["mean"]


def test_priorities_stop_those_below(jobs: str, capsys: Captured) -> None:
    words = ["simulate", jobs, "--gpus", "8", "--policy", "priority"]
    assert "no job has a priority of its own" in faults(words, capsys)
    assert answer([*words, "--qos-priorities", "high=10"], capsys)["preemptions"] > 0


def test_deadlines_come_from_a_factor_or_from_a_column(
    jobs: str, tmp_path: Path, capsys: Captured
) -> None:
    words = ["--gpus", "8", "--policy", "edf"]
    refused = faults(["simulate", jobs, *words], capsys)
    assert "no job has a deadline" in refused
    assert "--deadline-factor" in refused
    found = answer(["simulate", jobs, *words, "--deadline-factor", "3"], capsys)
    assert found["jobs_with_deadline"] == 60
    assert 0 < found["missed_deadlines"] < 60
    listed = tmp_path / "due.csv"
    listed.write_text(
        "id,num_gpus,arrival,duration,due\n1,1,0,100,150\n2,1,0,100,\n3,1,0,100,120\n"
    )
    asked = [
        "simulate",
        str(listed),
        "--gpus",
        "1",
        "--policy",
        "edf",
        "--column",
        "deadline_s=due",
    ]
    found = answer(asked, capsys)
    assert (found["jobs_with_deadline"], found["missed_deadlines"]) == (2, 1)
    assert main(["queue", *asked]) == 0
    assert "edf: 1 of 3 jobs have no deadline and come last" in capsys.readouterr().err


def test_policies_that_no_job_has_the_input_of_are_left_out_of_all(
    jobs: str, capsys: Captured
) -> None:
    assert main(["queue", "compare", jobs, "--gpus", "16", "--policies", "all"]) == 0
    printed = capsys.readouterr()
    assert "left out: edf, as no job has deadlines" in printed.err
    assert "left out: priority, as no job has priorities" in printed.err
    assert "elastic: every job has one size" in printed.err
    assert not any(line.startswith(("edf", "priority")) for line in printed.out.splitlines())
    assert "no job has a deadline" in faults(
        ["compare", jobs, "--gpus", "16", "--policies", "fifo,edf"], capsys
    )


@pytest.mark.parametrize(("name", "said"), [("tiresias", "use las"), ("themis", "use max-min")])
def test_other_names_of_policies_lead_to_ours(
    name: str, said: str, jobs: str, capsys: Captured
) -> None:
    assert said in faults(["simulate", jobs, "--gpus", "16", "--policy", name], capsys)
    assert said in faults(["compare", jobs, "--gpus", "16", "--policies", name], capsys)


def test_restarts_cost_what_a_table_says_and_runs_are_stretched(
    tmp_path: Path, capsys: Captured
) -> None:
    listed, table = tmp_path / "list.csv", tmp_path / "restart.csv"
    listed.write_text("id,gpus,submit,duration,model\na,1,0,100,bert\nb,2,0,100,vgg\n")
    table.write_text("gpus,model,restart_s\n1,bert,5\n*,*,20\n")
    words = ["simulate", str(listed), "--gpus", "4", "--column", "gpus=gpus"]
    assert answer(words, capsys)["jct_s"]["mean"] == 100
    words += ["--restart-table", str(table), "--stretch", "1.5"]
    assert answer(words, capsys)["jct_s"]["mean"] == (155 + 170) / 2
    table.write_text("gpus,model,restart_s\n1,bert,soon\n")
    assert "line 2, column restart_s: 'soon' is no number of seconds" in faults(words, capsys)


@pytest.mark.parametrize(("policy", "said"), [("srtf", "shortest"), ("srsf", "shortest-gpu")])
def test_the_figures_of_muris_simulator_are_reached_from_the_command_line(
    shared: Path, policy: str, said: str, capsys: Captured
) -> None:
    folder = shared / "fleet_traces" / "muri"
    if not folder.exists():
        pytest.skip("needs Muri's traces in the shared data folder")
    words = ["simulate", str(folder / "sim_trace3.csv.gz"), "--gpus", "64", "--gpus-per-node", "8"]
    words += ["--policy", policy, "--migrate", "--restart-every-decision", "--stretch", "1.015"]
    found = answer([*words, "--restart-table", "examples/muri_restart.csv"], capsys)
    text = (folder / "reference_results.json").read_text()
    published = json.loads(text)["upstream_muri_simulator"]["trace3"][said]
    assert found["jct_s"]["mean"] == pytest.approx(published["avg_jct_s"], rel=1e-6)
    assert found["jct_s"]["p99"] == pytest.approx(published["p99_jct_s"], rel=1e-6)
    assert found["makespan_s"] == pytest.approx(published["makespan_s"], rel=1e-6)


def test_a_fleets_store_is_read(jobs: str, tmp_path: Path, capsys: Captured) -> None:
    store = str(tmp_path / "fleet")
    assert main(["fleet", "ingest", jobs, "--store", store]) == 0
    capsys.readouterr()
    there = answer(["simulate", store, "--gpus", "16", "--policy", "easy"], capsys)
    file = answer(["simulate", jobs, "--gpus", "16", "--policy", "easy"], capsys)
    assert there["jct_s"] == file["jct_s"]


def test_a_fleets_store_of_an_older_version_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"")
    assert main(["queue", "simulate", str(tmp_path), "--gpus", "16"]) == 2
    assert "store of an older version" in capsys.readouterr().err


def test_a_cluster_has_its_own_jobs_and_nodes(tmp_path: Path, capsys: Captured) -> None:
    head = "cluster,job,attempt,submit_s,start_s,end_s,gpus"
    rows = ["a,1,0,0,0,60,8", "b,2,0,90,90,120,1"]
    (tmp_path / "jobs.csv").write_text("\n".join([head, *rows]) + "\n")
    (tmp_path / "nodes.csv").write_text(
        "cluster,node,since_s,state,gpus\na,n1,0,up,8\nb,n1,0,up,4\nb,n2,0,up,4\n"
    )
    where = str(tmp_path)
    assert answer(["simulate", where], capsys)["gpus"] == 16
    one = answer(["simulate", where, "--cluster", "b"], capsys)
    assert (one["gpus"], one["jobs"], one["makespan_s"]) == (8, 1, 30)
    assert main(["queue", "simulate", where]) == 0
    assert "jobs of 2 clusters share these GPUs" in capsys.readouterr().err
    assert main(["queue", "simulate", where, "--cluster", "b"]) == 0
    printed = capsys.readouterr()
    assert "clusters share" not in printed.err
    assert "over 1 team or user;" in printed.out


def test_clusters_are_filled(tmp_path: Path, capsys: Captured) -> None:
    pods = tmp_path / "openb_pod_list_small.csv"
    head = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
        "deletion_time,scheduled_time"
    )
    shapes = ("1,500", "1,300", "1,1000", "2,1000", "0,0")
    rows = [
        f"pod-{at},2000,1024,{shapes[at % 5]},,LS,Running,{at},{at + 100},{at}" for at in range(50)
    ]
    pods.write_text("\n".join([head, *rows]) + "\n")
    nodes = tmp_path / "openb_node_list_small.csv"
    nodes.write_text(
        "sn,cpu_milli,memory_mib,gpu,model\n"
        + "".join(f"node-{at},64000,262144,4,T4\n" for at in range(8))
    )
    found = answer(["pack", str(pods), "--nodes", str(nodes), "--trials", "2"], capsys)
    given = {one["placement"]: one["allocated"]["1.3"] for one in found["runs"]}
    assert found["gpus"] == 32
    assert given["fragmentation"] >= given["random"]
    assert all(0.8 < share <= 1 for share in given.values())
    # Lists without any times can be packed too.
    pods.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"
        + "".join(f"pod-{at},2000,1024,{shapes[at % 5]}\n" for at in range(50))
    )
    again = answer(["pack", str(pods), "--nodes", str(nodes), "--placements", "best-fit"], capsys)
    assert again["jobs"] == 50
    assert "placement" in faults(
        ["pack", str(pods), "--nodes", str(nodes), "--placements", "bestfit"], capsys
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --gpus; the largest job has 8"),
        (["--gpus", "4"], "asks for 8 GPUs and there are 4"),
        (["--gpus", "16", "--gpus-per-node", "3"], "do not fill nodes of 3"),
        (["--gpus-per-node", "8"], "says nothing alone"),
        (["--gpus", "16", "--failures-per-node-day", "1"], "say how many GPUs a node has"),
        (["--gpus", "16", "--quotas", "team0"], "names no number"),
        (["--gpus", "16", "--policy", "quota", "--quotas", "team0=8"], "has no quota"),
        (["--gpus", "16", "--elastic-range", "2"], "MIN:MAX"),
        (["--gpus", "16", "--arrival-scale", "0"], "--arrival-scale"),
        (["--gpus", "16", "--max-jobs", "0"], "--max-jobs: 0 is not a whole number of at least 1"),
        (["--gpus", "16", "--cluster", "other"], "use one of c\n"),
    ],
)
def test_mistakes_are_told_with_their_remedy(
    words: list[str], said: str, jobs: str, capsys: Captured
) -> None:
    assert said in faults(["simulate", jobs, *words], capsys)


def test_unknown_policies_are_refused_with_the_nearest(jobs: str, capsys: Captured) -> None:
    assert "srtf" in faults(["compare", jobs, "--gpus", "16", "--policies", "srft"], capsys)
