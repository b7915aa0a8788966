"""What is read of a run: its rows as they come, its sessions, and its step as predicted."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.twin.drift.run_steps import (
    MetricsTail,
    parse_step,
    predict_expected_step,
    read_run_config,
    read_run_work,
    read_sessions,
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
    rows = MetricsTail(path)
    assert list(rows.read_new_rows()) == []  # it may not be there yet
    path.write_text(line(1, step_s=0.5) + line(1, eval_loss=2.0) + '{"step": 2, "st')
    assert [row["step"] for row in rows.read_new_rows()] == [1]
    with path.open("a") as file:
        file.write('ep_s": 0.6}\n' + "no row\n" + line(3, step_s=0.7))
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 4 is damaged"):
        assert [row["step_s"] for row in rows.read_new_rows()] == [0.6, 0.7]
    assert list(rows.read_new_rows()) == []


def test_a_run_that_goes_on_gives_only_steps_that_are_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = MetricsTail(path)
    path.write_text("".join(line(step, step_s=1.0) for step in range(1, 8)))
    assert len(list(rows.read_new_rows())) == 7
    new = tmp_path / "new"
    new.write_text("".join(line(step, step_s=1.0) for step in range(1, 10)))
    new.replace(path)  # as `JsonlLogger` cuts
    assert [row["step"] for row in rows.read_new_rows()] == [8, 9]


def test_parts_of_a_step_add_up_and_hidden_waits_cost_nothing() -> None:
    row = {
        "step": 9,
        "step_s": 1.0,
        "tokens_per_s": 1.0,
        "step_gap_s": 0.1,
        "forward_backward_s": 0.7,
        "optimizer_s": 0.2,
        "data_wait_fraction": 0.3,
    }
    found = parse_step(row)
    assert found.terms == {"data": 0.1, "between": 0.0, "gradients": 0.7, "update": 0.2}
    assert not found.starts_session
    assert parse_step({**row, "comm_wait_s": 0.05}).terms["exchange"] == 0.05


def test_rows_of_older_runs_tell_no_parts() -> None:
    found = parse_step({"step": 1, "step_s": 2})
    assert (found.step_s, found.terms, found.starts_session) == (2.0, {}, True)


def test_sessions_are_read_as_far_as_they_can(tmp_path: Path) -> None:
    assert read_sessions(tmp_path) == []
    (tmp_path / "sessions.jsonl").write_text(
        '{"after": 0, "device": "CPU", "torch": "2.13.0"}\n{"after"\n'
        '{"after": 9, "device": "NVIDIA H200", "gpu": "h200"}\n'
    )
    first, second = read_sessions(tmp_path)
    assert (first.gpu, first.versions) == ("cpu-core", {"torch": "2.13.0"})
    assert (second.resumed_after_step, second.gpu) == (9, "h200")


def test_a_run_of_an_older_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sittings.jsonl").write_text('{"after": 0, "device": "CPU"}\n')
    with pytest.raises(InputError, match=r"older version of mw train: it has sittings\.jsonl"):
        read_sessions(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.toml"):
        read_run_config(tmp_path)


def test_the_band_is_narrower_with_a_calibration_of_the_device() -> None:
    work = read_run_work(CONFIG, "h200-superpod")
    wide = predict_expected_step(work)
    assert wide.low_s < wide.step_s < wide.high_s
    assert sum(wide.terms.values()) == pytest.approx(wide.step_s, rel=1e-6)
    near = predict_expected_step(work, Calibration(gpu=work.cluster.gpu.name, source="a test"))
    assert near.high_s / near.low_s < wide.high_s / wide.low_s
    assert near.high_s == pytest.approx(near.step_s / 0.9)


def test_what_ranks_exchange_is_part_of_their_passes_on_gpus_only() -> None:
    layout = {"microbatch": 2, "dp": 2}
    on_gpus = predict_expected_step(read_run_work({**CONFIG, "layout": layout}, "h200-superpod"))
    on_cores = predict_expected_step(read_run_work({**CONFIG, "layout": layout}, "cpu-host"))
    assert "exchange" not in on_gpus.terms
    assert on_cores.terms["exchange"] > 0
