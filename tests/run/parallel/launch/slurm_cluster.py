"""A Slurm of this machine's own, for tests: two nodes of four CPUs, which are this machine.

Its daemons are children of the test and live in a folder of their own; nothing of a Slurm that the
machine may have is touched.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


class Cluster(NamedTuple):
    """A running Slurm."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *words: str) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """Return the state of a job, such as COMPLETED."""
        shown = self.ask("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, *states: str, within_s: float = 120) -> str:
        """Wait until a job is in one of some states; return the one it was in last."""
        until = time.monotonic() + within_s
        while (state := self.state(job)) not in states and time.monotonic() < until:
            time.sleep(0.25)
        return state

    def idle(self) -> bool:
        """Tell whether nothing runs on either node."""
        return self.ask("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"]

    def hasten(self, job: str) -> None:
        """Start a job that queues again soon: Slurm would wait for two minutes.

        It waits because orders to end the old life, which has the same number, may be on their way.
        """
        until = time.monotonic() + 60
        while "Restarts=0" in self.ask("scontrol", "show", "job", job):
            assert time.monotonic() < until, "the job did not queue again"
            time.sleep(0.2)
        while not (self.state(job) == "PENDING" and self.idle()) and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(3)
        while self.state(job) == "PENDING" and time.monotonic() < until:
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.5)


@contextmanager
def slurm() -> Iterator[Cluster]:
    """Start a Slurm, and end it."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        pytest.skip(f"needs Slurm (Debian: slurm-wlm, munge); {', '.join(absent)} not found")
    host = socket.gethostname().partition(".")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        pytest.skip(f"needs a host name that resolves; {host} does not")
    folder = Path(tempfile.mkdtemp(prefix="mw-slurm-"))
    cluster = Cluster(
        folder, {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    )
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder, host)
        munge = folder / "munge"
        daemons.append(
            _daemon(
                cluster, "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
                f"--socket={munge}/socket", f"--pid-file={munge}/pid",
                f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            )
        )  # fmt: skip
        _until((munge / "socket").exists, "munged opens its socket", folder)
        daemons.append(_daemon(cluster, "slurmctld", "-D", "-i"))
        daemons += [_daemon(cluster, "slurmd", "-D", "-N", node) for node in ("n1", "n2")]
        _until(cluster.idle, "two nodes are idle", folder)
        yield cluster
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            cluster.ask("scancel", "--user", getpass.getuser())
            _settled(cluster)
        for daemon in reversed(daemons):
            _end(daemon)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, host: str) -> None:
    for name in ("munge", "state", "spool", "log"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    control, first, second = _free_ports(3)
    user = getpass.getuser()
    (folder / "slurm.conf").write_text(
        f"""ClusterName=meshwright
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 OverTimeLimit=0 State=UP
"""
    )
    version = subprocess.run(
        ["slurmctld", "-V"], env={**os.environ, "PATH": _PATH}, capture_output=True, text=True,
        check=True,
    ).stdout.split()[-1]  # fmt: skip
    if int(version.partition(".")[0]) >= 23:  # later ones ask for control groups otherwise
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in listeners]
    for one in listeners:
        one.close()
    return ports


def _daemon(cluster: Cluster, *words: str) -> subprocess.Popen[bytes]:
    log = (cluster.folder / "log" / f"{words[0]}-{words[-1]}.out".replace("/", "_")).open("wb")
    with log:
        return subprocess.Popen(
            words, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _until(done: Callable[[], bool], what: str, folder: Path, within_s: float = 60) -> None:
    until = time.monotonic() + within_s
    while not done():
        if time.monotonic() > until:
            logs = "\n".join(path.read_text()[-1500:] for path in (folder / "log").iterdir())
            raise AssertionError(f"waited in vain until {what}\n{logs}")
        time.sleep(0.1)


def _settled(cluster: Cluster) -> None:
    """Wait for cancelled jobs to be gone, so that no step is left behind."""
    until = time.monotonic() + 15
    while cluster.ask("squeue", "--noheader").strip() and time.monotonic() < until:
        time.sleep(0.2)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
