"""Text of sacct in any shape: delimiters, zones, broken lines, steps, arrays, requeues."""

import io
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.slurm.formats import delimited_table
from meshwright.fleet.sources.slurm.formats.sacct import read_sacct
from meshwright.fleet.sources.slurm.tables.jobs import build_job_rows


def jobs(text: str, zone: str = "UTC", **more: Any) -> list[dict[str, Any]]:
    records, _ = read_sacct(io.BytesIO(text.encode()), "test", zone)
    rows: list[dict[str, Any]] = build_job_rows(records, 9e9, **more).rows.to_pylist()
    return rows


def test_any_list_of_fields_will_do() -> None:
    (job,) = jobs("JobID|State|Start|End\n7|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:01:00\n")
    assert (job["job"], job["state"], job["end_s"] - job["start_s"]) == ("7", "completed", 60.0)
    assert job["gpus"] is None
    assert job["user"] is None


@pytest.mark.parametrize("delimiter", ["|", "|#", ",", "\t", "\x1f"])
def test_any_delimiter_will_do(delimiter: str) -> None:
    text = "JobID|JobName|State\n7|a|COMPLETED\n8|b|FAILED\n".replace("|", delimiter)
    assert [job["name"] for job in jobs(text)] == ["a", "b"]


def test_a_delimiter_of_two_letters_leaves_its_first_alone() -> None:
    (job,) = jobs("JobID|#JobName|#State\n7|#a|b|#COMPLETED\n")
    assert job["name"] == "a|b"


def test_a_trailing_delimiter_is_no_field() -> None:
    assert jobs("JobID|State|\n7|COMPLETED|\n")[0]["state"] == "completed"


def test_names_and_command_lines_may_hold_the_delimiter_and_ends_of_lines() -> None:
    head = "JobID|JobName|State|Start|SubmitLine|NNodes\n"
    rows = jobs(
        f"{head}1|a|COMPLETED|2026-01-01T00:00:00|sbatch a|1\n"
        "2|b|c|d|FAILED|2026-01-01T00:00:01|sbatch -J b|c|d --wrap 'x\ny|z\n'|2\n"
        "3|e|TIMEOUT|2026-01-01T00:00:02|sbatch e|3\n"
    )
    assert [(job["name"], job["state"], job["num_nodes"]) for job in rows] == [
        ("a", "completed", 1), ("b|c|d", "failed", 2), ("e", "timeout", 3),
    ]  # fmt: skip


def test_lines_that_nothing_can_be_made_of_are_counted() -> None:
    text = "JobID|State|Start\n1|COMPLETED|2026-01-01T00:00:00\n2|?|x|y|z\n3|FAILED|Unknown\n"
    records, notes = read_sacct(io.BytesIO(text.encode()), "here", "UTC")
    assert records["id"].to_pylist() == ["1", "3"]
    assert notes == ("here: 1 lines could not be cut into their fields",)


def test_blocks_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    head = "JobID|JobName|State\n"
    body = "".join(
        f"{n}|job{n}{' x' * (n % 5)}\n more|RUNNING\n{n}.0|s|RUNNING\n" for n in range(40)
    )
    whole = jobs(head + body)
    assert len(whole) == 40
    for size in (16, 33, 100):
        monkeypatch.setattr(delimited_table, "BLOCK_BYTES", size)
        assert jobs(head + body) == whole


def test_what_is_no_table_of_sacct_is_refused() -> None:
    with pytest.raises(InputError, match="no line of field names"):
        read_sacct(io.BytesIO(b"1|2|3\n"), "here")
    with pytest.raises(InputError, match="neither JobID nor JobIDRaw"):
        read_sacct(io.BytesIO(b"User|State\na|RUNNING\n"), "here")


def test_local_times_become_utc() -> None:
    text = "JobID|State|Start|End\n7|COMPLETED|2026-07-01T12:00:00|2026-12-01T12:00:00\n"
    (job,) = jobs(text, "Europe/Berlin")
    assert job["start_s"] == 1782900000.0  # 10:00 in UTC, summer
    assert job["end_s"] == 1796122800.0  # 11:00, winter


def test_in_the_hour_that_comes_twice_what_passed_tells_which_was_meant() -> None:
    # On 2026-10-25 clocks in Berlin go from 03:00 back to 02:00.
    head = "JobID|State|Submit|Start|End|ElapsedRaw\n"
    day = "2026-10-25T"
    late = f"1|COMPLETED|{day}01:00:00|{day}02:30:00|{day}02:50:00|4800\n"
    both = f"2|COMPLETED|{day}02:10:00|{day}02:30:00|{day}03:30:00|3600\n"
    one, two = jobs(head + late + both, "Europe/Berlin")
    assert one["end_s"] - one["start_s"] == 4800
    assert two["end_s"] - two["start_s"] == 3600
    assert one["start_s"] == two["start_s"] - 3600
    assert two["submit_s"] <= two["start_s"]


def test_epochs_need_no_zone() -> None:
    (job,) = jobs("JobID|State|Start\n7|RUNNING|1782900000\n", "Asia/Tokyo")
    assert job["start_s"] == 1782900000.0


def test_times_that_are_not_known_are_null() -> None:
    (job,) = jobs(
        "JobID|State|Submit|Eligible|Start|End|NodeList|TimelimitRaw\n"
        "7|PENDING|2026-01-01T00:00:00|Unknown|Unknown|Unknown|None assigned|UNLIMITED\n"
    )
    assert job["submit_s"] == 1767225600.0
    names = ("eligible_s", "start_s", "end_s", "nodes", "time_limit_s", "exit_code")
    assert {job[name] for name in names} == {None}


def test_what_was_cancelled_before_it_ran_never_started() -> None:
    (job,) = jobs(
        "JobID|State|Submit|Start|End|NodeList|AllocTRES|ReqTRES\n"
        "7|CANCELLED by 1000|2026-01-01T00:00:00|2026-01-01T01:00:00|2026-01-01T01:00:00"
        "|None assigned||gres/gpu=4,node=1\n"
    )
    assert (job["state"], job["start_s"], job["gpus"]) == ("cancelled", None, 4.0)
    assert job["end_s"] is not None
    assert job["reason"] == "cancelled by 1000"


def test_who_cancelled_is_named_where_the_records_know() -> None:
    rows = jobs(
        "JobID|State|User|UID\n1|CANCELLED by 1000|eve|1001\n2|COMPLETED|bob|1000\n"
        "3|CANCELLED by 0|eve|1001\n"
    )
    assert [job["reason"] for job in rows] == ["cancelled by bob", None, "cancelled by root"]


def test_exit_codes_have_signals() -> None:
    rows = jobs("JobID|State|ExitCode\n1|FAILED|3:0\n2|FAILED|0:9\n3|RUNNING|0:0\n")
    assert [(job["exit_code"], job["signal"]) for job in rows] == [(3, 0), (0, 9), (None, None)]


STEPS = "JobID|State|NTasks|AllocTRES|MaxRSS|AveRSS|TotalCPU|TRESUsageInTot\n"


def test_steps_are_folded_into_their_job() -> None:
    (job,) = jobs(
        f"{STEPS}1|COMPLETED||gres/gpu=8,cpu=8||||\n"
        "1.batch|COMPLETED|1|cpu=4|100K|100K|00:01.500|mem=100K\n"
        "1.0|COMPLETED|2|gres/gpu=8|300K|200K|01:00:00|mem=400K\n"
    )
    assert job["memory_peak"] == 400 * 1024
    assert job["cpu_s"] == 3601.5
    assert job["interactive"] is False


def test_memory_of_tasks_adds_up_where_only_averages_are_told() -> None:
    (job,) = jobs("JobID|State|NTasks|AveRSS|MaxRSS\n1|FAILED|||\n1.0|FAILED|4|1M|2M\n")
    assert job["memory_peak"] == 4 * 2**20


def test_the_use_of_gpus_is_a_mean_not_a_sum() -> None:
    (job,) = jobs(
        f"{STEPS}1|COMPLETED||gres/gpu=4||||\n"
        "1.0|COMPLETED|1|gres/gpu:a100=4,gres/gpu=4||||gres/gpumem=64G,gres/gpuutil=396\n"
    )
    assert job["gpu_util"] == pytest.approx(0.99)
    assert job["gpu_memory_peak"] == 64 * 2**30


def test_a_card_that_cannot_be_asked_tells_nothing() -> None:
    (job,) = jobs(
        f"{STEPS}1|COMPLETED||gres/gpu=4||||\n1.0|COMPLETED|1|gres/gpu=4||||gres/gpumem=0,gres/gpuutil=0\n"
    )
    assert job["gpu_util"] is None


def test_steps_without_their_job_tell_that_there_was_one() -> None:
    rows = jobs(
        "JobID|JobIDRaw|State|Start|End|AllocTRES|NodeList\n"
        "5_1.extern|9.extern|RUNNING|2026-01-01T00:00:00|Unknown|gres/gpu=1|n1\n" * 3
    )
    assert len(rows) == 1  # outputs put behind each other, each with its header
    assert (rows[0]["job"], rows[0]["scheduler_id"], rows[0]["state"]) == ("5_1", "9", "running")
    assert rows[0]["gpus"] == 1.0


def test_elements_of_an_array_that_wait_are_a_row_each() -> None:
    rows = jobs(
        "JobID|JobIDRaw|State|ReqTRES\n71_[1-3%2]|71|PENDING|gres/gpu=2\n71_9|80|RUNNING|\n"
    )
    assert [(job["job"], job["array"]) for job in rows] == [
        ("71_1", "71"), ("71_2", "71"), ("71_3", "71"), ("71_9", "71"),
    ]  # fmt: skip
    assert rows[0]["gpus"] == 2.0
    assert rows[3]["scheduler_id"] == "80"


def test_parts_of_a_heterogeneous_job_are_jobs() -> None:
    rows = jobs(
        "JobID|JobIDRaw|State|AllocTRES\n9+0|9|FAILED|gres/gpu=1\n9+1|10|FAILED|gres/gpu=2\n"
    )
    assert [(job["job"], job["scheduler_id"], job["gpus"]) for job in rows] == [
        ("9+0", "9", 1),
        ("9+1", "10", 2),
    ]


REQUEUED = (
    "JobID|State|Submit|Start|End\n"
    "6|REQUEUED|2026-01-01T00:00:00|2026-01-01T00:01:00|2026-01-01T00:02:00\n"
    "6.batch|CANCELLED|2026-01-01T00:01:00|2026-01-01T00:01:00|2026-01-01T00:02:00\n"
    "6|NODE_FAIL|2026-01-01T00:02:00|2026-01-01T00:05:00|2026-01-01T00:06:00\n"
    "6|RUNNING|2026-01-01T00:06:00|2026-01-01T00:09:00|Unknown\n"
)


def test_each_time_a_job_is_requeued_is_an_attempt() -> None:
    assert [(job["attempt"], job["state"]) for job in jobs(REQUEUED)] == [
        (0, "requeued"), (1, "node_fail"), (2, "running"),
    ]  # fmt: skip


def test_records_that_come_twice_are_one() -> None:
    again = REQUEUED + REQUEUED.partition("\n")[2]
    assert jobs(again) == jobs(REQUEUED)


def test_what_waited_and_what_started_since_are_one_record() -> None:
    rows = jobs(
        "JobID|State|Submit|Start|End\n"
        "6|RUNNING|2026-01-01T00:00:00|2026-01-01T00:01:00|Unknown\n"
        "6|PENDING|2026-01-01T00:00:00|Unknown|Unknown\n"
        "7|PENDING|2026-01-01T00:00:00|Unknown|Unknown\n"
        "7|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:01:00|2026-01-01T00:02:00\n"
    )
    assert [(job["job"], job["state"]) for job in rows] == [("6", "running"), ("7", "completed")]


def test_slurms_count_of_restarts_holds_where_earlier_records_are_gone() -> None:
    text = "JobID|State|Submit|Restarts\n6|RUNNING|2026-01-01T00:00:00|3\n"
    assert jobs(text)[0]["attempt"] == 3


def test_nodes_have_the_names_of_today() -> None:
    (job,) = jobs(
        "JobID|State|NodeList\n1|COMPLETED|old[1-2],n3\n", renames={"old1": "n1", "old2": "n2"}
    )
    assert job["nodes"] == ["n1", "n2", "n3"]


def test_a_cluster_that_does_not_count_gpus_does_not_say_nought() -> None:
    text = "JobID|State|AllocTRES\n1|COMPLETED|cpu=8,mem=1G,node=1\n"
    assert jobs(text)[0]["gpus"] is None
    assert jobs(text, counts_gpus=True)[0]["gpus"] == 0.0


@pytest.mark.parametrize(
    ("name", "line", "sat"),
    [
        ("interactive", "salloc -G1", True),
        ("train", "srun -G1 --pty bash", True),
        ("sys/dashboard/sys/jupyter", "sbatch x", True),
        ("train", "sbatch x.sh", False),
        ("train", "", None),
    ],
)  # fmt: skip
def test_who_sits_at_a_job(name: str, line: str, sat: bool | None) -> None:
    assert (
        jobs(f"JobID|JobName|SubmitLine|State\n1|{name}|{line}|COMPLETED\n")[0]["interactive"]
        is sat
    )


def test_reserved_is_what_planned_was_called() -> None:
    for name in ("Planned", "Reserved"):
        (job,) = jobs(
            f"JobID|State|Eligible|{name}|ElapsedRaw\n1|COMPLETED|2026-01-01T00:00:00|00:01:00|30\n"
        )
        assert job["start_s"] == 1767225660.0
        assert job["end_s"] == 1767225690.0


def test_a_name_in_another_encoding_costs_only_its_letters() -> None:
    records, _ = read_sacct(io.BytesIO(b"JobID|JobName|State\n7|\xfcber|FAILED\n8|b|FAILED\n"), "x")
    assert records["name"].to_pylist() == ["\ufffdber", "b"]


def test_a_header_of_another_table_ends_soon() -> None:
    wide = "|".join("x" for _ in range(90))
    text = "JobID|JobName|SubmitLine|AllocTRES|State\n" + f"{wide}|a=b=c=d=e=f=g|{wide}\n" * 400
    with pytest.raises(InputError, match="none of its lines has a field for each"):
        read_sacct(io.BytesIO(text.encode()), "here")
