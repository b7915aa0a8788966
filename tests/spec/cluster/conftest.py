"""What the cluster tests build on: the texts of real kinds of machines, and small values."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.spec.cluster import Cluster, Fabric, Gpu, Host, Nics, ScaleUpDomain, SwitchTier

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def text() -> Callable[[str], str]:
    """Read a topology file of the data folder by name."""
    return lambda name: (DATA / name).read_bytes().decode()


@pytest.fixture(scope="session")
def hopper() -> Gpu:
    """A GPU with round figures."""
    return Gpu(
        name="hopper",
        title="A Hopper GPU",
        vendor="nvidia",
        arch="sm_90",
        bf16_flops=1e15,
        fp8_flops=2e15,
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=3e12,
        pcie_bytes_per_s=64e9,
    )


@pytest.fixture(scope="session")
def fat_tree(hopper: Gpu) -> Cluster:
    """Sixty-four nodes of 8 GPUs: leaves of 4 nodes by rail, spines of 16 at 2:1, a core at 3:1."""
    return Cluster(
        name="fat-tree",
        title="A fat tree",
        gpu=hopper,
        nodes=64,
        scale_up=ScaleUpDomain(
            kind="nvlink", gpus=8, gpu_bytes_per_s=450e9, latency_s=1e-6, switched=True
        ),
        host=Host(link="pcie5", gpu_bytes_per_s=64e9, latency_s=1e-6),
        nics=Nics(per_node=8, nic_bytes_per_s=48e9, latency_s=3e-6),
        fabric=Fabric(
            kind="infiniband",
            rail_optimised=True,
            tiers=(
                SwitchTier(name="leaf", nodes=4, latency_s=0.2e-6),
                SwitchTier(name="spine", nodes=16, oversubscription=2, latency_s=0.4e-6),
                SwitchTier(name="core", oversubscription=3, latency_s=0.4e-6),
            ),
        ),
    )
