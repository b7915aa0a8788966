"""What is read of a run: its rows as they come, its sittings, and its step as predicted."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.twin.drift_run import (
    Rows,
    config_of,
    expected_of,
    sittings_of,
    step_of,
    work_of,
)
from meshwright.predict.cost import Calibration

CONFIG = {
    "model": "smollm2-135m",
    "layout": {"microbatch": 8},
    "workload": {"tokens": 8192 * 100, "sequence_length": 1024, "global_batch": 8},
    "optimizer": {"lr": 1e-3},
}


def line(step: int, **figures: float) -> str:
    return json.dumps({"step": step, **figures}) + "\n"


def test_rows_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows(path)
    assert list(rows.new()) == []  # it may not be there yet
    path.write_text(line(1, step_s=0.5) + line(1, held_out_loss=2.0) + '{"step": 2, "st')
    assert [row["step"] for row in rows.new()] == [1]
    with path.open("a") as file:
        file.write('ep_s": 0.6}\n' + "no row\n" + line(3, step_s=0.7))
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 4 is damaged"):
        assert [row["step_s"] for row in rows.new()] == [0.6, 0.7]
    assert list(rows.new()) == []


def test_a_run_that_goes_on_gives_only_steps_that_are_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows(path)
    path.write_text("".join(line(step, step_s=1.0) for step in range(1, 8)))
    assert len(list(rows.new())) == 7
    new = tmp_path / "new"
    new.write_text("".join(line(step, step_s=1.0) for step in range(1, 10)))
    new.replace(path)  # as `JsonLines` cuts
    assert [row["step"] for row in rows.new()] == [8, 9]


def test_parts_of_a_step_add_up_and_hidden_waits_cost_nothing() -> None:
    row = {"step": 9, "step_s": 1.0, "tokens_per_s": 1.0, "between_s": 0.1, "gradients_s": 0.7,
           "update_s": 0.2, "data_wait_share": 0.3}  # fmt: skip
    found = step_of(row)
    assert found.terms == {"data": 0.1, "between": 0.0, "gradients": 0.7, "update": 0.2}
    assert not found.begins
    assert step_of({**row, "exchange_wait_s": 0.05}).terms["exchange"] == 0.05


def test_rows_of_older_runs_tell_no_parts() -> None:
    found = step_of({"step": 1, "step_s": 2})
    assert (found.step_s, found.terms, found.begins) == (2.0, {}, True)


def test_sittings_are_read_as_far_as_they_can(tmp_path: Path) -> None:
    assert sittings_of(tmp_path) == []
    (tmp_path / "sittings.jsonl").write_text(
        '{"after": 0, "device": "CPU", "torch": "2.13.0"}\n{"after"\n'
        '{"after": 9, "device": "NVIDIA H200", "gpu": "h200"}\n'
    )
    first, second = sittings_of(tmp_path)
    assert (first.gpu, first.versions) == ("cpu-core", {"torch": "2.13.0"})
    assert (second.after, second.gpu) == (9, "h200")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.toml"):
        config_of(tmp_path)


def test_the_band_is_narrower_with_a_calibration_of_the_device() -> None:
    work = work_of(CONFIG, "h200-superpod")
    wide = expected_of(work)
    assert wide.low_s < wide.step_s < wide.high_s
    assert sum(wide.terms.values()) == pytest.approx(wide.step_s, rel=1e-6)
    near = expected_of(work, Calibration(gpu=work.cluster.gpu.name, source="a test"))
    assert near.high_s / near.low_s < wide.high_s / wide.low_s
    assert near.high_s == pytest.approx(near.step_s / 0.9)


def test_what_ranks_exchange_is_part_of_their_passes_on_gpus_only() -> None:
    layout = {"microbatch": 2, "dp": 2}
    on_gpus = expected_of(work_of({**CONFIG, "layout": layout}, "h200-superpod"))
    on_cores = expected_of(work_of({**CONFIG, "layout": layout}, "cpu-host"))
    assert "exchange" not in on_gpus.terms
    assert on_cores.terms["exchange"] > 0
