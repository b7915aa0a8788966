"""What every test may ask for: Hypothesis profiles, interpreted kernels, quick ranks, real data."""

import os
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Where there is no GPU, Triton interprets the kernels: it has to know before any test imports one.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What somebody measured on this machine must not change what tests predict.
os.environ["MESHWRIGHT_CALIBRATIONS"] = "off"

# Deadlines are off: the test machines are shared, and a slow moment is not a fault.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and published figures, which lies beside the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the repository (../shared)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def quick_ranks(request: pytest.FixtureRequest) -> None:
    """Fork the ranks of tests from a process that has loaded what most of them need.

    Each would take most of a second of a core to load it. Whoever launches first decides what is
    loaded, so this comes before all tests, where some of them launch ranks.
    """
    spread = ROOT / "tests" / "run" / "parallel"
    if find_spec("torch") and any(spread in item.path.parents for item in request.session.items):
        ours = (
            "parallel.algorithm_selection",
            "parallel.health.watchdog",
            "parallel.verify.layout_verification",
            "train.step_backend",
        )
        torchs = "torch.fx.experimental.symbolic_shapes"  # by the first backward of a pipeline
        forkserver.set_forkserver_preload([torchs, *(f"meshwright.run.{each}" for each in ours)])
        forkserver.ensure_running()
