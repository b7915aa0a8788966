"""Published rows are read as the work they describe, predicted, and never dropped."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.validation.training import (
    ScoredRun,
    read_runs,
    score_run,
    score_runs,
    summarize_scores,
)
from meshwright.predict.validation.training.run_cluster import parse_nic_bytes_per_s, read_cluster
from meshwright.predict.validation.training.run_layout import read_layout
from meshwright.predict.validation.training.run_model import UnusableRowError, read_model
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.model import count_parameters
from meshwright.spec.workload import TrainingWorkload

RUNS = Path(__file__).parents[4] / "validation" / "training" / "runs.json"
ROWS = read_runs(RUNS)
BY_ID = {row["id"]: row for row in ROWS}
pytestmark = pytest.mark.xdist_group("published")  # all rows are scored once, by one worker
KORTHIKANTI = [row for row in ROWS if row["family"] == "Korthikanti 2022"]


def test_every_row_gets_a_result(results: list[ScoredRun]) -> None:
    assert [result.id for result in results] == [row["id"] for row in ROWS]
    for result in results:
        assert (result.skipped is None) == (result.predicted_step_s is not None)


def test_most_rows_can_be_predicted(results: list[ScoredRun]) -> None:
    skipped = [result for result in results if result.skipped]
    assert len(skipped) < 0.05 * len(ROWS)
    assert all(result.predicted_step_s is None and result.error is None for result in skipped)


def test_the_classic_rows_are_close() -> None:
    errors = [abs(score_run(row).error or 9) for row in KORTHIKANTI]
    assert sum(errors) / len(errors) < 0.10


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("GPT 175B", 175e9), ("Llama3-70B", 70.6e9), ("DeepSeek-V3 671B", 671e9)],
)
def test_models_have_the_size_of_their_name(name: str, parameters: float) -> None:
    row = next(row for row in ROWS if row["model"]["name"] == name)
    assert count_parameters(read_model(row)).total == pytest.approx(parameters, rel=0.01)


def test_an_unsaid_number_of_offloaded_layers_is_the_fewest_that_fit() -> None:
    scored = score_run(BY_ID["mbridge-26.04.01-pretrain-Llama3-70B-GB200-fp8-cs-g64-b256"])
    assert scored.setup is not None
    layout, software = scored.setup
    layers = layout.offload_layers or 0
    assert f"activations of {layers} layers per chunk offloaded" in scored.assumed
    row = BY_ID[scored.id]
    step = TrainingWorkload(tokens=1, sequence_length=row["seq"], global_batch=row["global_batch"])
    for count, fits in ((layers - 1, False), (layers, True)):
        fewer = msgspec.structs.replace(layout, offload_layers=count)
        work = JobSpec(
            model=read_model(row), cluster=read_cluster(row), layout=fewer, workload=step
        )
        assert predict_memory(TrainingRun(work, framework=software)).fits == fits


@pytest.mark.parametrize(("gpu", "link", "rate"), [("GB200", "c2c", 225e9), ("B200", "pcie", 63e9)])
def test_grace_parts_have_no_pcie_link_to_their_host(gpu: str, link: str, rate: float) -> None:
    row = {"gpu": gpu, "gpus": 16, "gpus_per_node": 4}
    host = read_cluster(row).host
    assert (host.link, host.gpu_bytes_per_s, host.sockets) == (link, rate, 2)


def test_layouts_use_all_gpus_of_their_row() -> None:
    for row in ROWS[::10]:
        try:
            model = read_model(row)
            layout = read_layout(row, model).layout
        except UnusableRowError:
            continue
        assert layout.gpus == row["gpus"]
        assert sum(layout.stage_layers or (model.layers,)) == model.layers


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("8x A100 NVLink3 per node, 4x Omni-Path 100 Gb/s per node (50 Gb/s per GPU)", 6.25),
        ("NVLink3 + NVSwitch 600 GB/s/GPU total, 8x HDR InfiniBand 200 Gb/s per node", 25),
        ("NVLink5 NVL8, 16 EFA NICs per node, 6.4 Tb/s per node", 100),
        ("H100 NVLink4; InfiniBand 8x50 GB/s per node", 50),
        ("8 GPUs/node NVLink; inter-node fabric not stated", 50),
    ],
)
def test_network_words_are_understood(text: str, gigabytes: float) -> None:
    assert parse_nic_bytes_per_s(text, 8, "sm_90") == pytest.approx(gigabytes * 1e9)


def test_racks_of_seventy_two_are_one_domain() -> None:
    row = next(row for row in ROWS if "NVL72" in row["interconnect"])
    assert read_cluster(row).scale_up.gpus == 72


def test_the_summary_counts_what_was_scored(results: list[ScoredRun]) -> None:
    summed = summarize_scores(results)
    assert summed["overall"]["rows"] == sum(result.error is not None for result in results)
    assert sum(group["rows"] for group in summed["by_gpu"].values()) == summed["overall"]["rows"]
    assert len(summed["worst"]) == 10


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(
    row=st.sampled_from(ROWS[::50]),
    key=st.sampled_from(["model", "layout", "gpus", "gpu", "seq", "global_batch", "interconnect"]),
    value=JUNK,
)
def test_a_garbled_row_is_skipped_with_a_reason(row: dict[str, Any], key: str, value: Any) -> None:
    result = score_run({**row, key: value})
    assert result.skipped or result.predicted_step_s is not None


def test_a_file_that_is_no_list_of_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(InputError, match="list of runs"):
        read_runs(path)


def test_a_batch_that_nearly_divides_is_rounded_and_said() -> None:
    row = {**KORTHIKANTI[0], "gpus": 32, "global_batch": 1537, "micro_batch": 1}
    row["layout"] = {**row["layout"], "tp": 8, "pp": 1, "vpp": None, "dp": 4}
    assert any("1536" in text for text in score_run(row).assumed)
    odd = score_run({**row, "global_batch": 6})
    assert odd.skipped is not None
    assert "do not divide" in odd.skipped


@pytest.mark.parametrize("entry", [None, 5, "x", [], {}, {"id": "only"}])
def test_an_entry_that_is_no_run_keeps_its_place(entry: Any) -> None:
    (result,) = score_runs([entry])
    assert result.skipped
    assert summarize_scores([result])["overall"] == {"rows": 0}


def test_a_step_that_cannot_be_is_not_scored() -> None:
    result = score_run({**KORTHIKANTI[0], "derived": {"step_time_s": -1.0}})
    assert result.error is None
    assert "cannot be" in (result.skipped or "")
