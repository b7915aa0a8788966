"""Hooks: what the scripts do on sound and on broken nodes, with stand-ins for commands."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.fleet.health.hooks.hook_files import NODE_CONDITION, write_hooks
from meshwright.fleet.health.xids import list_drain_xids

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("sh", "awk", "timeout"))), reason="no POSIX shell here"
)


class Machine:
    """A node with commands of our own."""

    def __init__(self, folder: Path, *, drain: bool = False) -> None:
        self.bin, self.hooks = folder / "bin", folder / "hooks"
        self.bin.mkdir()
        write_hooks("slurm", self.hooks, drain=drain)
        self.log = folder / "log"
        (folder / "uptime").write_text("10000.00 9000.00\n")
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "UPTIME_FILE": str(folder / "uptime"),
            "SLURM_JOB_GPUS": "0,1",
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n1",
        }
        self.has("nvidia-smi", 'case "$1" in *rows*) exit 1;; esac; echo "0, 0"; echo "1, 0"')
        self.has("dmesg", "true")
        self.has("logger", f'echo "logger $*" >>{self.log}')
        self.has("scontrol", f'echo "scontrol $*" >>{self.log}')

    def has(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def set(self, name: str, value: str) -> None:
        conf = self.hooks / "health.conf"
        conf.write_text(re.sub(rf"(?m)^{name}=\S*", f"{name}={value}", conf.read_text()))

    def run(self, script: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(self.hooks / script)], env=self.environment, capture_output=True, text=True,
            check=False, timeout=30,
        )  # fmt: skip
        assert not done.stderr
        return done.returncode, done.stdout.strip()

    @property
    def done(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def xid(code: int, at_s: float = 9990.0) -> str:
    return f"echo '[ {at_s:.6f}] NVRM: Xid (PCI:0000:9b:00): {code}, pid=1, name=a, text'"


def test_a_sound_node_is_fit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, drain=True)
    assert machine.run("check.sh") == (0, "fit: 2 GPUs")
    assert machine.run("prolog.sh") == (0, "")
    assert machine.run("epilog.sh") == (0, "")
    assert not machine.done


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 94])
def test_xids_of_programs_are_no_reason(tmp_path: Path, code: int) -> None:
    machine = Machine(tmp_path, drain=True)
    machine.has("dmesg", xid(code))
    assert machine.run("check.sh")[0] == 0


def test_an_xid_of_hardware_drains_only_where_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("dmesg", f"{xid(31)}; {xid(79)}")
    assert machine.run("check.sh") == (1, "unfit: Xid 79 in the last 900 s")
    assert machine.run("prolog.sh") == (0, "")
    assert machine.run("epilog.sh") == (0, "")
    assert "scontrol" not in machine.done
    assert "before job 7: unfit: Xid 79" in machine.done
    machine.set("DRAIN", "yes")
    assert machine.run("prolog.sh") == (1, "")
    assert "scontrol update nodename=n1 state=drain reason=mw-health unfit: Xid 79" in machine.done
    assert machine.run("epilog.sh") == (0, "")


def test_an_old_xid_is_not_held_against_a_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("dmesg", xid(79, at_s=500.0))
    assert machine.run("check.sh")[0] == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("echo 'Unable to determine the device handle'; exit 15", "nvidia-smi failed"),
        ("sleep 9", "did not answer in 1 s"),
        ("echo '0, 0'", "1 GPUs of 2"),
        ("case $1 in *rows*) echo '00000000:9B:00.0, Yes';; *) echo '0, 0'; echo '1, 0';; esac",
         "cannot remap memory"),
        ("echo '0, 0'; echo '1, 4'", "GPU 1 has uncorrected memory errors"),
    ],
)  # fmt: skip
def test_each_finding(tmp_path: Path, body: str, told: str) -> None:
    machine = Machine(tmp_path)
    for name, value in (("GPUS", "2"), ("LIMIT_S", "1"), ("ECC", "yes")):
        machine.set(name, value)
    machine.has("nvidia-smi", body)
    code, said = machine.run("check.sh")
    assert code == 1
    assert told in said


def test_ports_must_be_active_where_asked(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set("INFINIBAND", "yes")
    machine.environment["PORTS_FOLDER"] = str(tmp_path / "ib")
    for name, state, link in (
        ("mlx5_0", "4: ACTIVE", "5: LinkUp"),
        ("mlx5_1", "1: DOWN", "3: Disabled"),
    ):
        port = tmp_path / "ib" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "phys_state").write_text(link)
    assert machine.run("check.sh")[0] == 0
    (tmp_path / "ib" / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN")
    assert machine.run("check.sh") == (1, "unfit: port mlx5_0/ports/1 is 1: DOWN")


def test_measuring_is_for_prologs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set("BENCH", "yes")
    machine.has("mw", "exit 1")
    assert machine.run("check.sh") == (1, "unfit: slower than its kind (mw bench --health-check)")
    machine.run("epilog.sh")
    assert not machine.done
    machine.run("prolog.sh")
    assert "slower than its kind" in machine.done
    machine.has("mw", "exit 2")
    assert machine.run("check.sh")[0] == 2


def test_without_a_driver_nothing_is_claimed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, drain=True)
    (machine.bin / "nvidia-smi").unlink()
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    assert machine.run("check.sh")[0] == 2
    assert machine.run("prolog.sh") == (0, "")


def test_kubernetes_gets_a_plugin_and_a_monitor(tmp_path: Path) -> None:
    write_hooks("kubernetes", tmp_path)
    plugin = json.loads((tmp_path / "health-plugin.json").read_text())
    assert plugin["plugin"] == "custom"
    assert plugin["rules"][0]["condition"] == plugin["conditions"][0]["type"] == NODE_CONDITION
    monitor = json.loads((tmp_path / "kernel-monitor.json").read_text())
    form = re.compile(monitor["rules"][0]["pattern"])
    line = "NVRM: Xid (PCI:0000:9b:00): {}, pid=1, name=a, text"
    assert {code for code in range(1, 200) if form.search(line.format(code))} == set(
        list_drain_xids()
    )
    config = yaml.safe_load((tmp_path / "configmap.yaml").read_text())
    assert config["kind"] == "ConfigMap"
    assert json.loads(config["data"]["health-plugin.json"]) == plugin


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        write_hooks("slurm", tmp_path / "file")
