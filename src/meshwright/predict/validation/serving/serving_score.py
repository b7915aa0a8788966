"""Score predictions of serving against published runs: one result per row, none dropped."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.predict.validation.serving.case_prediction import CasePrediction, predict_case
from meshwright.predict.validation.serving.serving_case import ServingCase, read_case
from meshwright.predict.validation.training.run_model import UnusableRowError


class ScoredServing(msgspec.Struct, frozen=True, kw_only=True):
    """One row with its prediction; times in seconds."""

    row: int
    source: str
    engine: str
    model: str
    gpu: str
    kind: str = ""
    """How the load came: queued, concurrent, static, paced, disaggregated, MLPerf's."""
    predicted_output_tok_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    measured_output_tok_s: float | None = None
    measured_ttft_s: float | None = None
    measured_tpot_s: float | None = None
    derived: bool = False
    """The measured throughput was worked out from the row's other figures."""
    throughput_error: float | None = None
    """Predicted over measured, less one."""
    ttft_error: float | None = None
    tpot_error: float | None = None
    layout: str = ""
    batch: float | None = None
    assumed: tuple[str, ...] = ()
    skipped: str | None = None
    """Why there is no prediction."""


def score_serving(rows: Iterable[Any]) -> list[ScoredServing]:
    """Predict every row that can be, and say of every other why not."""
    return [_scored(number, row) for number, row in enumerate(rows)]


def _scored(number: int, row: Any) -> ScoredServing:
    if not isinstance(row, Mapping):
        return ScoredServing(
            row=number, source="", engine="", model="", gpu="", skipped="the row is no object"
        )
    source, engine, model, gpu = (
        str(row.get(name) or "") for name in ("source", "engine", "model", "gpu")
    )
    blank = ScoredServing(row=number, source=source, engine=engine, model=model, gpu=gpu)
    try:
        case = read_case(row)
        priced = predict_case(case)
    except (UnusableRowError, InputError) as error:
        return msgspec.structs.replace(blank, skipped=str(error))
    return _compared(blank, case, priced)


def _compared(blank: ScoredServing, case: ServingCase, priced: CasePrediction) -> ScoredServing:
    measured, layout = case.measured, priced.replica.layout
    return msgspec.structs.replace(
        blank,
        engine=priced.replica.engine.name,
        model=priced.replica.model.name,
        gpu=priced.replica.cluster.gpu.name,
        kind=get_load_kind(case),
        predicted_output_tok_s=priced.output_tok_s,
        predicted_ttft_s=priced.ttft_s,
        predicted_tpot_s=priced.tpot_s,
        measured_output_tok_s=measured.output_tok_s,
        measured_ttft_s=measured.ttft_s,
        measured_tpot_s=measured.tpot_s,
        derived=measured.derived,
        throughput_error=relative_error(priced.output_tok_s, measured.output_tok_s),
        ttft_error=relative_error(priced.ttft_s, measured.ttft_s),
        tpot_error=relative_error(priced.tpot_s, measured.tpot_s),
        layout=f"tp{layout.tp} pp{layout.pp} dp{layout.dp} ep{layout.ep}",
        batch=priced.batch,
        assumed=case.assumed,
    )


def get_load_kind(case: ServingCase) -> str:
    """Name how a case's load came."""
    asked = case.load
    if case.prefill is not None:
        return "disaggregated"
    if asked.is_offline:
        return "mlperf-offline" if asked.request_load.rate_per_s is None else "mlperf-paced"
    if asked.is_static_batch:
        return "static"
    if asked.request_load.rate_per_s is not None:
        return "paced"
    return "concurrent" if asked.request_load.concurrency is not None else "queued"


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted over measured, less one."""
    if predicted is None or not measured or not math.isfinite(predicted):
        return None
    return predicted / measured - 1
