"""`mw roofline`: kernels against what the device can do."""

import json
from pathlib import Path

import msgspec
import pytest

from meshwright.cli import main
from meshwright.predict.cost import Calibration
from meshwright.predict.cost.calibration import save_calibration
from meshwright.predict.cost.curves import MemoryCurve
from meshwright.predict.cost.device_costs import list_measured_devices
from meshwright.timeline import write_timeline
from tests.observe.analyze.traces import call, host, kernel, timeline

Captured = pytest.CaptureFixture[str]
DEVICES = {"devices": '[{"name": "NVIDIA H100 80GB HBM3"}]'}


def _arguments(dims: list[list[int]], kind: str = "c10::BFloat16") -> str:
    return json.dumps({"Input Dims": dims, "Input type": [kind] * len(dims)})


def _trace(folder: Path, metadata: dict[str, str] | None) -> str:
    product = _arguments([[4096, 4096], [4096, 4096]])
    fused = _arguments([[1_000_000], [1_000_000]])
    rows = [
        host(0, 30_000, "aten::mm", extra=product),
        call(10_000, 20_000, flow_out=1),
        kernel(100_000, 300_000, "gemm", flow_in=1),
        host(40_000, 70_000, "triton_poi_fused_add_0", extra=fused),
        call(50_000, 60_000, flow_out=2),
        kernel(300_000, 310_000, "triton_poi_fused_add_0", flow_in=2),
        call(80_000, 90_000, flow_out=3),
        kernel(310_000, 330_000, "mystery", flow_in=3),
    ]
    write_timeline(timeline(*rows, metadata=metadata), folder)
    return str(folder)


def test_roofs_are_flops_over_peak_and_bytes_over_bandwidth(
    tmp_path: Path, capsys: Captured
) -> None:
    assert main(["roofline", _trace(tmp_path / "t", DEVICES), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in answer["kernels"]}
    gemm, fused = rows["gemm"], rows["triton_poi_fused_add_0"]
    assert gemm["bound"] == "compute"
    assert gemm["flops"] == 2 * 4096**3
    assert gemm["bytes"] == 3 * 2 * 4096**2
    assert gemm["least_ms"] == pytest.approx(2 * 4096**3 / 989e12 * 1e3, rel=0.01)
    assert fused["bound"] == "memory"
    assert fused["least_ms"] == pytest.approx(4e6 / 3.35e12 * 1e3, rel=0.01)


def test_a_trace_without_spans_is_not_blamed_on_ranks(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    assert main(["roofline", str(tmp_path / "t.json"), "--gpu", "h100-80g-sxm"]) == 2
    assert "holds no spans" in capsys.readouterr().err


def test_a_trace_that_breaks_off_before_its_kernels_says_so(
    tmp_path: Path, capsys: Captured
) -> None:
    event = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":%d,"dur":1}'
    text = '{"traceEvents": [' + ",".join(event % at for at in range(50))
    (tmp_path / "t.json").write_text(text)
    assert main(["roofline", str(tmp_path / "t.json"), "--gpu", "h100-80g-sxm"]) == 2
    assert "breaks off before the first kernel" in capsys.readouterr().err


def test_what_is_not_covered_is_said(tmp_path: Path, capsys: Captured) -> None:
    main(["roofline", _trace(tmp_path / "t", DEVICES), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in answer["uncovered"]] == ["mystery"]
    assert answer["covered_share"] == pytest.approx(210 / 230)


def test_attention_of_unknown_lengths_has_no_roof(tmp_path: Path, capsys: Captured) -> None:
    packed = _arguments([[8192, 16, 128]] * 3)
    rows = [
        host(0, 30_000, "flash_attn_3::fwd", extra=packed),
        call(10_000, 20_000, flow_out=1),
        kernel(100_000, 300_000, "FlashAttnFwdSm90", flow_in=1),
    ]
    write_timeline(timeline(*rows, metadata=DEVICES), tmp_path / "t")
    main(["roofline", str(tmp_path / "t"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["kernels"] == []
    assert [row["name"] for row in answer["uncovered"]] == ["FlashAttnFwdSm90"]


def test_an_unknown_device_is_asked_for(tmp_path: Path, capsys: Captured) -> None:
    path = _trace(tmp_path / "t", None)
    assert main(["roofline", path]) == 2
    assert "--gpu" in capsys.readouterr().err
    assert main(["roofline", path, "--gpu", "h100-80g-sxm"]) == 0
    assert "of roof" in capsys.readouterr().out


@pytest.mark.real
def test_a_compiled_training_step_is_covered_to_more_than_four_fifths(
    shared: Path, capsys: Captured
) -> None:
    path = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11" / "rank-0.json.gz"
    main(["roofline", str(path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["covered_share"] > 0.8
    products = [row["share"] for row in answer["kernels"] if row["bound"] == "compute"]
    assert max(products) < 1


def test_roofs_are_what_was_measured_where_there_is_a_calibration(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CALIBRATIONS", str(tmp_path / "mine"))
    curve = msgspec.structs.replace(
        list_measured_devices()["h100-80g-sxm"].products[0], efficiency=0.5
    )
    memory = (MemoryCurve(op="copy", efficiency=0.8), MemoryCurve(op="permute", efficiency=1.6))
    found = Calibration(gpu="h100-80g-sxm", source="here", products=(curve,), memory=memory)
    (tmp_path / "mine").mkdir()
    save_calibration(found, tmp_path / "mine" / "h100-80g-sxm.toml")
    words = ["roofline", _trace(tmp_path / "t", DEVICES)]
    both = []
    for more in ([], ["--no-calibration"]):
        assert main([*words, *more, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        rows = {row["name"]: row["least_ms"] for row in answer["kernels"]}
        both.append((rows["gemm"], rows["triton_poi_fused_add_0"], answer["calibration"]["source"]))
    (own, own_moved, own_source), (peak, peak_moved, peak_source) = both
    assert own == pytest.approx(peak / 0.5)
    assert own_moved == pytest.approx(peak_moved / 0.8)
    assert (own_source, peak_source) == ("here", None)
    assert main(words) == 0
    assert "the best that was measured here" in capsys.readouterr().out
