"""Slurm's commands asked for what is new; the commands here only print what they are told to."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, MissingDependency
from meshwright.fleet.sources.slurm.command_source import SlurmCommandSource
from meshwright.fleet.sources.source import SourceOptions

DAY = 86400.0
FIELDS = "JobID JobIDRaw State Submit Start End NodeList AllocTRES Restarts"
CONFIG = "ClusterName             = east\nAccountingStorageTRES   = cpu,mem,gres/gpu\n"
RUNNING = (
    "JobId=7 JobName=a\n   JobState=RUNNING Reason=None\n   Restarts=0\n"
    "   SubmitTime=2026-01-01T00:00:00\n   StartTime=2026-01-01T00:01:00 EndTime=Unknown\n"
    "   NodeList=n1\n   TRES=cpu=1,node=1,gres/gpu=2\n"
    "     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)\n"
)


class Fake:
    """Programs on a path of their own, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sacct", "scontrol", "sacctmgr"):
            script = folder / name
            script.write_text(
                "#!/bin/sh\n"
                f'printf "%s\\n" "{name} $*" >>{folder}/asked\n'
                '[ "$TZ" = UTC ] || exit 9\n'
                'case "$*" in\n'
                f"-e) cat {folder}/fields ;;\n"
                f"*config*) cat {folder}/config ;;\n"
                f"*) cat {folder}/{name}.out ;;\n"
                "esac\n"
            )
            script.chmod(0o755)
        self.tell("fields", FIELDS)
        self.tell("config", CONFIG)
        self.tell("scontrol.out", "")
        self.tell("sacctmgr.out", "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|TRES\n")
        self.account("")

    def tell(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def account(self, lines: str) -> None:
        text = f"{FIELDS.replace(' ', '|')}\n{lines}"
        self.tell("sacct.out", text.replace("|", "\x1f"))

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        lines = path.read_text().splitlines()
        path.unlink()
        return [line for line in lines if line.startswith("sacct -a")]

    def source(self, **asked: Any) -> SlurmCommandSource:
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin"}
        return SlurmCommandSource(
            SourceOptions(**asked), {}, environment=environment, overlap_s=600.0
        )


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_what_runs_is_asked_for_until_it_has_ended(fake: Fake) -> None:
    job = "7|7|{}|2026-01-01T00:00:00|2026-01-01T00:01:00|{}|n1|cpu=1,gres/gpu=2|0\n"
    fake.account(job.format("RUNNING", "Unknown"))
    fake.tell("scontrol.out", RUNNING)
    first = list(fake.source().read_batches())
    fake.asked()
    cursor = first[-1].cursor
    assert cursor is not None
    assert json.loads(cursor)["open"] == ["7"]
    # Accounting lags: nobody tells of the job, so its GPUs stay its own.
    fake.account("")
    fake.tell("scontrol.out", "")
    (batch,) = fake.source().read_batches(cursor)
    (window, by_number) = fake.asked()
    assert "-j 7" in by_number
    assert "-j" not in window
    lagging = batch.cursor
    assert lagging is not None
    assert len(json.loads(lagging)["allocations"]) == 2
    # And then it does.
    fake.account(job.format("CANCELLED by 0", "2026-01-01T00:05:00"))
    rows = {batch.table: batch.rows.to_pylist() for batch in fake.source().read_batches(lagging)}
    assert [row["state"] for row in rows["jobs"]] == ["cancelled"]
    assert {(row["gpu"], row["end_s"]) for row in rows["allocations"]} == {
        (0, rows["jobs"][0]["end_s"]), (1, rows["jobs"][0]["end_s"]),
    }  # fmt: skip


def test_going_on_asks_for_an_overlap(fake: Fake) -> None:
    list(fake.source().read_batches(json.dumps({"until_s": 1767225600.0})))
    assert "-S 2025-12-31T23:50:00" in fake.asked()[0]


def test_a_long_past_is_read_in_pieces_that_are_kept(fake: Fake) -> None:
    since = 1767225600.0
    source = fake.source(since_s=since, until_s=since + 15 * DAY)
    cursors = [batch.cursor for batch in source.read_batches()]
    ends = [json.loads(cursor)["until_s"] for cursor in cursors if cursor]
    assert ends == [since + 7 * DAY, since + 14 * DAY, since + 15 * DAY]
    windows = [line.partition("-S ")[2] for line in fake.asked()]
    assert [window[:10] for window in windows] == ["2026-01-01", "2026-01-08", "2026-01-15"]
    assert [window.partition("-E ")[2][:10] for window in windows] == [
        "2026-01-08", "2026-01-15", "2026-01-16",
    ]  # fmt: skip


def test_a_cluster_that_counts_gpus_says_nought_of_jobs_without(fake: Fake) -> None:
    fake.account("7|7|COMPLETED|2026-01-01T00:00:00|Unknown|Unknown|n1|cpu=1|0\n")
    (batch,) = fake.source().read_batches()
    (job,) = batch.rows.to_pylist()
    assert (job["gpus"], job["cluster"]) == (0.0, "east")


def test_a_command_that_fails_says_why(fake: Fake) -> None:
    (fake.folder / "scontrol").write_text(
        "#!/bin/sh\necho 'Unable to contact slurmctld' >&2; exit 1\n"
    )
    with pytest.raises(InputError, match="Unable to contact slurmctld"):
        list(fake.source().read_batches())


def test_a_machine_without_slurm_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="sacct and scontrol"):
        SlurmCommandSource(SourceOptions(), {}, environment={"PATH": str(tmp_path)})
