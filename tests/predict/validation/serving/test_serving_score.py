"""Scores of published serving runs: one result per row, errors near those that are documented."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.predict.validation.serving import score_serving, summarize_serving

RUNS = Path(__file__).parents[5] / "shared/validation/inference_runs.json"
ROW: dict[str, Any] = {
    "source": "perf-overview.md", "engine": "TensorRT-LLM", "engine_version": "0.17",
    "model": "LLaMA v3.1 8B", "gpu": "H200 141GB HBM3", "gpus": 1, "tp": 1, "pp": 1,
    "precision_weights": "FP8", "isl": 5000, "osl": 500,
    "concurrency_or_batch_or_rate": "max (all requests queued)", "output_tok_s": 3988.0,
}  # fmt: skip


def test_every_row_has_a_result_in_order() -> None:
    results = score_serving([ROW, {"model": 3}, "nonsense", ROW])
    assert [result.row for result in results] == [0, 1, 2, 3]
    assert [result.skipped is None for result in results] == [True, False, False, True]
    assert results[0].throughput_error == pytest.approx(0, abs=0.25)


def test_wrong_measurement_shows_as_an_error() -> None:
    (result,) = score_serving([{**ROW, "output_tok_s": 39880.0}])
    assert result.throughput_error is not None
    assert result.throughput_error < -0.8


def test_model_that_does_not_fit_is_said() -> None:
    (result,) = score_serving([{**ROW, "model": "LLaMA v3.1 405B", "precision_weights": "FP16"}])
    assert result.skipped == "the weights do not fit"


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        ("concurrency 4", "concurrent"),
        ("static batch 8", "static"),
        ("QPS 2, 50 requests", "paced"),
        ("QPS INF, 50 requests", "queued"),
        ("32 requests at once", "queued"),
    ],
)
def test_kinds_of_load(load: str, kind: str) -> None:
    (result,) = score_serving([{**ROW, "concurrency_or_batch_or_rate": load, "osl": 20}])
    assert result.kind == kind
    assert result.predicted_output_tok_s


def test_mlperf_layout_is_the_one_that_serves_most() -> None:
    row = {
        "engine": "TensorRT 10.2.0, CUDA 12.4", "model": "llama2-70b-99", "gpus": 2,
        "gpu": "NVIDIA H200-SXM-141GB",
        "concurrency_or_batch_or_rate": "MLPerf Offline, target_qps 12",
        "output_tok_s": 8700.0, "req_s": 29.5,
    }  # fmt: skip
    (result,) = score_serving([row])
    assert result.kind == "mlperf-offline"
    assert "the layout that serves most" in result.assumed
    assert result.throughput_error == pytest.approx(0, abs=0.4)


def test_more_prefill_workers_answer_sooner() -> None:
    each = "x(tp4 pp1 adp1 mtp4 ep1 bs1)"
    workers = f"mode disagg; prefill {{}}{each}, decode 2{each}"
    rows = [
        {
            **ROW, "source": "silicon_sample.csv", "model": "LLaMA v3.1 70B",
            "concurrency_or_batch_or_rate": "concurrency 64", "notes": workers.format(many),
        }
        for many in (1, 4)
    ]  # fmt: skip
    one, four = score_serving(rows)
    assert one.kind == four.kind == "disaggregated"
    assert one.predicted_ttft_s is not None
    assert four.predicted_ttft_s is not None
    assert four.predicted_ttft_s < one.predicted_ttft_s / 2


def test_summary_counts_and_groups() -> None:
    found = summarize_serving(
        score_serving([ROW, {**ROW, "gpu": "?"}, {**ROW, "output_tok_s": None}])
    )
    assert (found["rows"], found["predicted"]) == (3, 2)
    assert found["overall"]["throughput"]["rows"] == 1
    assert list(found["by_gpu"]) == ["h200-141g-sxm"]
    assert sum(found["skipped"].values()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not RUNS.exists(), reason="the published serving runs are not on this machine")
def test_published_rows_are_near() -> None:
    rows = json.loads(RUNS.read_text(encoding="utf-8"))[::29]
    found = summarize_serving(score_serving(rows))
    assert found["predicted"] > 0.9 * len(rows)
    assert found["overall"]["throughput"]["median_abs"] < 0.17
