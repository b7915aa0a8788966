"""The driver of `mw launch ray`, run by a real Ray of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.run.parallel.launch.launch_spec import LaunchSpec, NodeShape
from meshwright.run.parallel.launch.ray import RayOptions, render_driver

pytestmark = [pytest.mark.slow, pytest.mark.real]

MEET = Path(__file__).with_name("meet.py")
INIT = "ray.init(address=ADDRESS"


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run two "nodes" of two ranks on a Ray that is told it had four cores."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'meshwright[ray]'")
    start = LaunchSpec(
        name="meet",
        command=(sys.executable, str(MEET), *words),
        node_shape=NodeShape(nodes=2, ranks_per_node=2, device="cpu"),
    )
    text = render_driver(start, RayOptions(address="local", wait_s=60))
    assert INIT in text
    path = folder / "start.py"
    path.write_text(text.replace(INIT, f"{INIT}, num_cpus=4"))
    return subprocess.run(
        [sys.executable, path],
        cwd=folder,
        env={**os.environ, "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_four_ranks_on_two_nodes_run_to_completion(tmp_path: Path) -> None:
    done = ended(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("sum 6 of 4") == 4


def test_a_rank_that_ends_badly_ends_the_job(tmp_path: Path) -> None:
    done = ended(tmp_path, "--end", "7", "--of", "3")
    assert done.returncode == 1
    assert "ended with exit code 1" in done.stderr
