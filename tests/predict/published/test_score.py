"""Published rows are read as the work they describe, predicted, and never dropped."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.memory import predict_memory
from meshwright.predict.published import Scored, read_rows, score, score_row, summary
from meshwright.predict.published.clusters import cluster_of_row, nic_bytes_per_s
from meshwright.predict.published.layouts import layout_of
from meshwright.predict.published.models import Unusable, model_of
from meshwright.predict.run import Run
from meshwright.spec.model import count_parameters
from meshwright.spec.work import Work
from meshwright.spec.workload import Training

RUNS = Path(__file__).parents[3] / "validation" / "training" / "runs.json"
ROWS = read_rows(RUNS)
BY_ID = {row["id"]: row for row in ROWS}
pytestmark = pytest.mark.xdist_group("published")  # all rows are scored once, by one worker
KORTHIKANTI = [row for row in ROWS if row["family"] == "Korthikanti 2022"]


def test_every_row_gets_a_result(results: list[Scored]) -> None:
    assert [result.id for result in results] == [row["id"] for row in ROWS]
    for result in results:
        assert (result.skipped is None) == (result.predicted_step_s is not None)


def test_most_rows_can_be_predicted(results: list[Scored]) -> None:
    skipped = [result for result in results if result.skipped]
    assert len(skipped) < 0.05 * len(ROWS)
    assert all(result.predicted_step_s is None and result.error is None for result in skipped)


def test_the_classic_rows_are_close() -> None:
    errors = [abs(score_row(row).error or 9) for row in KORTHIKANTI]
    assert sum(errors) / len(errors) < 0.10


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("GPT 175B", 175e9), ("Llama3-70B", 70.6e9), ("DeepSeek-V3 671B", 671e9)],
)
def test_models_have_the_size_of_their_name(name: str, parameters: float) -> None:
    row = next(row for row in ROWS if row["model"]["name"] == name)
    assert count_parameters(model_of(row)).total == pytest.approx(parameters, rel=0.01)


def test_an_unsaid_number_of_offloaded_layers_is_the_fewest_that_fit() -> None:
    scored = score_row(BY_ID["mbridge-26.04.01-pretrain-Llama3-70B-GB200-fp8-cs-g64-b256"])
    assert scored.setup is not None
    layout, software = scored.setup
    layers = layout.offload_layers or 0
    assert f"activations of {layers} layers per chunk offloaded" in scored.assumed
    row = BY_ID[scored.id]
    step = Training(tokens=1, sequence_length=row["seq"], global_batch=row["global_batch"])
    for count, fits in ((layers - 1, False), (layers, True)):
        fewer = msgspec.structs.replace(layout, offload_layers=count)
        work = Work(model=model_of(row), cluster=cluster_of_row(row), layout=fewer, workload=step)
        assert predict_memory(Run(work, software=software)).fits == fits


@pytest.mark.parametrize(("gpu", "link", "rate"), [("GB200", "c2c", 225e9), ("B200", "pcie", 63e9)])
def test_grace_parts_have_no_pcie_link_to_their_host(gpu: str, link: str, rate: float) -> None:
    row = {"gpu": gpu, "gpus": 16, "gpus_per_node": 4}
    host = cluster_of_row(row).host
    assert (host.link, host.gpu_bytes_per_s, host.sockets) == (link, rate, 2)


def test_layouts_use_all_gpus_of_their_row() -> None:
    for row in ROWS[::10]:
        try:
            model = model_of(row)
            layout = layout_of(row, model).layout
        except Unusable:
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
    assert nic_bytes_per_s(text, 8, "sm_90") == pytest.approx(gigabytes * 1e9)


def test_racks_of_seventy_two_are_one_domain() -> None:
    row = next(row for row in ROWS if "NVL72" in row["interconnect"])
    assert cluster_of_row(row).scale_up.gpus == 72


def test_the_summary_counts_what_was_scored(results: list[Scored]) -> None:
    summed = summary(results)
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
    result = score_row({**row, key: value})
    assert result.skipped or result.predicted_step_s is not None


def test_a_file_that_is_no_list_of_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(InputError, match="list of runs"):
        read_rows(path)


def test_a_batch_that_nearly_divides_is_rounded_and_said() -> None:
    row = {**KORTHIKANTI[0], "gpus": 32, "global_batch": 1537, "micro_batch": 1}
    row["layout"] = {**row["layout"], "tp": 8, "pp": 1, "vpp": None, "dp": 4}
    assert any("1536" in text for text in score_row(row).assumed)
    odd = score_row({**row, "global_batch": 6})
    assert odd.skipped is not None
    assert "do not divide" in odd.skipped


@pytest.mark.parametrize("entry", [None, 5, "x", [], {}, {"id": "only"}])
def test_an_entry_that_is_no_run_keeps_its_place(entry: Any) -> None:
    (result,) = score([entry])
    assert result.skipped
    assert summary([result])["overall"] == {"rows": 0}


def test_a_step_that_cannot_be_is_not_scored() -> None:
    result = score_row({**KORTHIKANTI[0], "derived": {"step_time_s": -1.0}})
    assert result.error is None
    assert "cannot be" in (result.skipped or "")
