"""The catalog's entry of a device, found by what its driver calls it."""

import pytest
import torch

from meshwright.run.train.profiling.device_peak import find_catalog_gpu, find_catalog_gpu_of_device


@pytest.mark.parametrize(
    ("driver", "memory_gb", "start"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100"),
        ("NVIDIA B200", 191, "b200"),
    ],
)
def test_a_driver_name_is_known(driver: str, memory_gb: int, start: str) -> None:
    gpu = find_catalog_gpu(driver, memory_gb * 10**9)
    assert gpu is not None
    assert gpu.name.split("-")[0] == start
    assert gpu.peak_flops("bf16") > 1e14


def test_memory_tells_models_of_one_name_apart() -> None:
    small, large = (find_catalog_gpu("NVIDIA A100", size) for size in (40 * 10**9, 80 * 10**9))
    assert small is not None
    assert large is not None
    assert small.memory_bytes < large.memory_bytes


def test_an_unknown_device_has_no_peak() -> None:
    assert find_catalog_gpu("Some Accelerator 9000", 10**10) is None
    assert find_catalog_gpu_of_device(torch.device("cpu")) is None
