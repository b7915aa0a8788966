"""Hooks of health in a real Slurm: a broken node is drained where told, its job goes back."""

import re
from pathlib import Path

import pytest

from meshwright.fleet.health.hooks.hook_files import render_slurm
from tests.real.slurm_cluster import SlurmCluster, lacking

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "never"),
    pytest.mark.xdist_group("slurm"),
]

SMI = """\
#!/bin/sh
case "$*" in *rows*) exit 1 ;; esac
if [ "$SLURMD_NODENAME" = n1 ] && [ -e {broken} ]; then
    echo "Unable to determine the device handle for GPU0"; exit 15
fi
echo "0, 0"
"""


def state(cluster: SlurmCluster, node: str) -> str:
    return cluster.call("scontrol", "show", "node", node)


def job(cluster: SlurmCluster, number: str) -> str:
    return cluster.call("scontrol", "show", "job", number)


def ended(cluster: SlurmCluster, number: str) -> bool:
    return "JobState=COMPLETED" in job(cluster, number)


def test_an_unfit_node_is_drained_only_where_told(tmp_path: Path) -> None:
    made, programs = render_slurm(drain=False), tmp_path / "bin"
    run, broken = tmp_path / "run", tmp_path / "broken"
    programs.mkdir()
    for name, text in (("nvidia-smi", SMI.format(broken=broken)), ("dmesg", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (run / "etc").mkdir(parents=True)
    conf = run / "etc/health.conf"
    here = f"export PATH={programs}:/usr/bin:/bin SLURM_CONF={run}/etc/slurm.conf\n"
    conf.write_text(made["health.conf"] + here)
    (run / "etc/check.sh").write_text(made["check.sh"])
    (run / "etc/check.sh").chmod(0o755)
    with SlurmCluster(run, made["prolog.sh"], made["epilog.sh"]) as cluster:
        broken.touch()
        first = cluster.submit("true", "--gpus=1", "-wn1")
        cluster.wait("a job on a node that is only logged", lambda: ended(cluster, first))
        assert "DRAIN" not in state(cluster, "n1")

        conf.write_text(re.sub(r"(?m)^DRAIN=\S+", "DRAIN=yes", conf.read_text()))
        second = cluster.submit("true", "--gpus=1", "--requeue", "--exclude=n3,n4")
        cluster.wait("a drained node", lambda: "DRAIN" in state(cluster, "n1"))
        assert "Reason=mw-health unfit: nvidia-smi failed: Unable" in state(cluster, "n1")
        cluster.wait("the job in the queue", lambda: "PENDING" in job(cluster, second), 30.0)
        third = cluster.submit("true", "--gpus=1", "--exclude=n3,n4")
        cluster.wait("a job elsewhere", lambda: ended(cluster, third), 30.0)
        assert "NodeList=n2" in job(cluster, third)
        assert "DRAIN" not in state(cluster, "n2")
