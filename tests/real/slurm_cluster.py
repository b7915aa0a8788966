"""A real Slurm on loopback: munge, MariaDB, slurmdbd, slurmctld, four nodes of eight fake GPUs.

Everything lives under one folder and on ports of its own, so that a Slurm of the machine is not
disturbed. GPUs are character devices that nobody opens; jobs, accounting, prologs and the REST
daemon are real.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = (
    "munged", "mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "slurmctld", "slurmd",
    "slurmrestd", "sbatch", "sacct", "scontrol", "sacctmgr",
)  # fmt: skip
PACKAGES = "slurm-wlm slurmdbd slurmrestd munge mariadb-server"
NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 8

_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={r}/munge/munge.socket
DbdHost=localhost
DbdPort={dbd}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
PidFile={r}/slurmdbd.pid
LogFile={r}/log/slurmdbd.log
"""

_CONF = """\
ClusterName=fleettest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={r}/munge/munge.socket
CredType=cred/munge
StateSaveLocation={r}/state
SlurmdSpoolDir={r}/spool/%n
SlurmctldPidFile={r}/slurmctld.pid
SlurmdPidFile={r}/slurmd.%n.pid
SlurmdLogFile={r}/log/slurmd.%n.log
SlurmctldLogFile={r}/log/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd}
AccountingStoragePass={r}/munge/munge.socket
AccountingStorageTRES=gres/gpu,gres/gpu:a100
AccountingStorageEnforce=associations
PrologFlags=Alloc
Prolog={prolog}
Epilog={epilog}
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=1
SchedulerParameters=bf_interval=1,sched_interval=2,requeue_setup_env_fail
SlurmdParameters=config_overrides
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{slurmd}-{slurmd_end}] \
CPUs=32 RealMemory=128000 Gres=gpu:a100:8 State=UNKNOWN
PartitionName=gpu Nodes=n[1-4] Default=YES MaxTime=1-0 DefMemPerCPU=1000 State=UP
"""


def lacking() -> str:
    """Say which programs of a Slurm this machine lacks, and how to have them; empty: none."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"needs Slurm ({', '.join(missing)} not found): apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "needs root, as slurmd does"
    try:
        socket.gethostbyname(_host())
    except OSError:
        return f"needs {_host()} in /etc/hosts, as slurmctld does"
    return ""


class SlurmCluster:
    """A Slurm cluster that lives as long as a `with` block."""

    def __init__(self, folder: Path, prolog: str, epilog: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(folder / "etc/slurm.conf"),
            "MYSQL_UNIX_PORT": str(folder / "mdb/s.sock"),
            "TZ": "UTC",
        }
        self._hooks = (prolog, epilog)
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def rest_socket(self) -> Path:
        """Where slurmrestd listens."""
        return self.folder / "rest.sock"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def call(self, *command: str, check: bool = True, extra: Mapping[str, str] = {}) -> str:
        """Run a command against this cluster and return what it printed."""
        environment = {**self.environment, **extra}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Queue a script and return the number of its job."""
        path = self.folder / "jobs" / f"{time.monotonic_ns()}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        out = str(self.folder / "out/%j.txt")
        told = self.call("sbatch", "--parsable", "-o", out, *options, str(path))
        return told.strip().split(";")[0]

    def wait(self, what: str, ready: Callable[[], bool], most_s: float = 60.0) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + most_s
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{log.name}: {log.read_text(errors='replace')[-800:]}"
                    for log in sorted((self.folder / "log").glob("*.log"))
                )
                raise TimeoutError(f"waited {most_s:.0f} s for {what}\n{logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End every job, then every process that was started."""
        if (self.folder / "slurmctld.pid").exists():
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.call("scancel", "--full", "-u", "root", check=False)
                self.wait("the end of all jobs", lambda: not self.call("squeue", "-h"), 15.0)
        for child in self._children:
            child.terminate()
        for name in (*(f"slurmd.{n}.pid" for n in NODES), "slurmctld.pid", "slurmdbd.pid"):
            _end(self.folder / name)
        for name in ("mdb/pid", "munge/munged.pid"):
            _end(self.folder / name)
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        self._children.clear()

    def _start(self) -> None:
        r = self.folder
        for name in ("etc", "munge", "mdb", "log", "state", "spool", "dev", "jobs", "out"):
            (r / name).mkdir(parents=True, exist_ok=True)
        (r / "munge").chmod(0o755)
        self._write_settings()
        key = r / "etc/munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = r / "munge"
        self.call(
            "munged", "--force", f"--key-file={key}", f"--socket={munge}/munge.socket",
            f"--pid-file={munge}/munged.pid", f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._start_database()
        self.call("slurmdbd")
        self.wait("slurmdbd", lambda: self._works("sacctmgr", "-i", "add", "cluster", "fleettest"))
        self.call("sacctmgr", "-i", "add", "account", "ml")
        self.call("sacctmgr", "-i", "add", "user", "root", "account=ml", "defaultaccount=ml")
        self.call("sacctmgr", "-i", "modify", "user", "root", "set", "defaultaccount=ml")
        self.call("slurmctld", "-i")
        for node in NODES:
            self.call("slurmd", "-N", node)
        self._spawn(
            ["slurmrestd", "-a", "rest_auth/local", f"unix:{self.rest_socket}"],
            {"SLURMRESTD_SECURITY": "disable_user_check"},
        )
        self.wait(
            "four idle nodes", lambda: self.call("sinfo", "-hN", "-o%T").split() == ["idle"] * 4
        )
        self.wait("slurmrestd", self.rest_socket.exists)

    def _works(self, *command: str) -> bool:
        try:
            self.call(*command)
        except RuntimeError as error:
            return "already exists" in str(error)
        return True

    def _write_settings(self) -> None:
        r = self.folder
        ports = _free_ports(6)
        hooks = []
        for name, text in zip(("prolog.sh", "epilog.sh"), self._hooks, strict=True):
            path = r / "etc" / name
            path.write_text(text)
            path.chmod(0o755)
            hooks.append(path)
        names = {
            "r": r, "host": _host(), "dbd": ports[0], "ctld": ports[1], "slurmd": ports[2],
            "slurmd_end": ports[5], "prolog": hooks[0], "epilog": hooks[1],
        }  # fmt: skip
        dbd = r / "etc/slurmdbd.conf"
        dbd.write_text(_DBD_CONF.format(**names))
        dbd.chmod(0o600)
        (r / "etc/slurm.conf").write_text(_CONF.format(**names))
        (r / "etc/gres.conf").write_text(
            f"NodeName=n[1-4] Name=gpu Type=a100 File={r}/dev/gpu[0-{GPUS_PER_NODE - 1}]\n"
        )
        for index in range(GPUS_PER_NODE):
            os.mknod(r / f"dev/gpu{index}", 0o600 | 0o020000, os.makedev(1, 3))

    def _start_database(self) -> None:
        data, sock = self.folder / "mdb", self.folder / "mdb/s.sock"
        self.call(
            "mariadb-install-db", "--no-defaults", "--force", "--user=root", f"--datadir={data}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        )  # fmt: skip
        self._spawn(
            ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={sock}",
             "--skip-networking", f"--pid-file={data}/pid", "--innodb-buffer-pool-size=64M"],
        )  # fmt: skip
        sql = (
            "create database slurm_acct_db; create user slurm@localhost identified by 'slurm'; "
            "grant all on slurm_acct_db.* to slurm@localhost"
        )
        self.wait("MariaDB", sock.exists)
        self.wait(
            "the database", lambda: self._works("mariadb", "-uroot", "-S", str(sock), "-e", sql)
        )

    def _spawn(self, command: list[str], extra: Mapping[str, str] = {}) -> None:
        log = (self.folder / "log" / f"{command[0]}.log").open("wb")
        self._children.append(
            subprocess.Popen(
                command, env={**self.environment, **extra}, stdout=log, stderr=subprocess.STDOUT
            )
        )
        log.close()


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports(count: int) -> list[int]:
    """Find a run of free ports, since the nodes of one line of slurm.conf have ports in a row."""
    for first in range(16800, 18000, count):
        held = []
        try:
            for port in range(first, first + count):
                one = socket.socket()
                held.append(one)
                one.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise RuntimeError("no free ports between 16800 and 18000")


def _end(pid_file: Path) -> None:
    """End the process of a pid file and wait for it, by force where it does not go."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    for sign, tries in ((signal.SIGTERM, 50), (signal.SIGKILL, 20)):
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            return
        for _ in range(tries):
            if not _alive(pid):
                return
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
