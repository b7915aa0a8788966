"""Curves of samples and of pickles give the same figures."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from meshwright.fleet.validation import compute_statistics

PATH = "acme.util_quantiles_from_pickles"


@pytest.fixture
def samples() -> np.ndarray:
    values = np.random.default_rng(3).choice([0.0, 40.0, 99.0, 100.0], 4000, p=[0.3, 0.1, 0.4, 0.2])
    return values.reshape(1000, 4)


def test_samples_side_by_side(tmp_path: Path, samples: np.ndarray) -> None:
    folder = tmp_path / "seren"
    folder.mkdir()
    rows = "\n".join(
        f"2023-07-01 08:{place // 60 % 60:02}:{place % 60:02}+08:00,"
        + ",".join("" if place == 5 else str(value) for value in row)
        for place, row in enumerate(samples)
    )
    header = "Time,10.0.0.1-0,10.0.0.1-1,10.0.0.2-0,10.0.0.2-1\n"
    (folder / "GPU_UTIL.csv").write_text(header + rows + "\n", encoding="utf-8")
    made = compute_statistics(tmp_path)
    known = np.delete(samples, 5, axis=0)
    path = f"{PATH}.Seren.gpu_util_pct"
    assert made[f"{path}.p50"].value == np.quantile(known, 0.5)
    assert made[f"{path}.mean_from_cdf"].value == pytest.approx(known.mean(), rel=0.01)
    assert made[f"{path}.cdf_at_5"].value == pytest.approx(100 * (known <= 5).mean(), abs=0.2)


def test_philly_samples(tmp_path: Path, samples: np.ndarray) -> None:
    rows = "\n".join(f"2017-10-03 00:08:00 PDT,m1,{row[0]},NA,{row[2]}," for row in samples)
    header = "time,machineId,gpu0_util,gpu1_util,gpu2_util\n"
    (tmp_path / "u").write_text(header + rows + "\n", encoding="utf-8")
    made = compute_statistics(tmp_path)
    known = samples[:, [0, 2]]
    found = made[f"{PATH}.Philly.gpu_util_pct.mean_from_cdf"].value
    assert found == pytest.approx(known.mean(), rel=0.01)


def test_pickled_curves(tmp_path: Path, samples: np.ndarray) -> None:
    shares = np.linspace(0, 1, 1000)
    curve = np.quantile(samples, shares)
    raw = pickle.dumps([curve, shares * 100, curve / 2, shares * 100], 4)
    (tmp_path / "gpu_temp_kalos.pkl").write_bytes(raw)
    (tmp_path / "other.pkl").write_bytes(raw)
    made = compute_statistics(tmp_path)
    assert made[f"{PATH}.Kalos.gpu_temp_c.p50"].value == 99
    assert made[f"{PATH}.Kalos.gpu_mem_temp_c.p50"].value == 49.5
    assert len(made) == 2 * 9
