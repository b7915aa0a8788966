"""`mw validate` holds predictions against published measurements."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


ROWS = [
    {
        "system": "a node",
        "gpu": "H100",
        "nodes": 1,
        "gpus": 8,
        "gpus_per_node": 8,
        "intra": "NVLink4 (H100/H200 NVSwitch)",
        "collective": "allreduce",
        "size_bytes": 1 << 26,
        "time_us": 330.0,
    },
    {"gpu": None, "size_bytes": 8},
    "damaged",
]


@pytest.fixture
def runs(tmp_path: Path) -> str:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    return str(path)


def test_collectives_answer_each_row_in_order(runs: str, capsys: Captured) -> None:
    assert main(["validate", "collectives", "--runs", runs, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.validate.collectives/1"
    first, second, third = answer["rows"]
    assert first["predicted_us"] == pytest.approx(330, rel=0.3)
    assert first["error"] == pytest.approx(first["predicted_us"] / 330 - 1)
    assert (first["algorithm"], first["protocol"]) == ("nvls", "simple")
    assert {"measured_us", "assumed", "skipped"} <= set(first)
    assert second["predicted_us"] is None
    assert "GPU" in second["skipped"]
    assert "damaged" in third["skipped"]


def test_collectives_print_how_much_of_nccls_log_is_repeated(runs: str, capsys: Captured) -> None:
    assert main(["validate", "collectives", "--runs", runs]) == 0
    assert "70 of 70" in capsys.readouterr().out
    assert main(["validate", "collectives", "--runs", runs, "--json"]) == 0
    tuning = json.loads(capsys.readouterr().out)["tuning"]
    assert tuning["share"] >= 0.95
    assert tuning["missed"] == []


def test_rows_without_any_measurement_have_no_median(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "none.json"
    path.write_text("[]", encoding="utf-8")
    assert main(["validate", "collectives", "--runs", str(path)]) == 0
    assert main(["validate", "collectives", "--runs", str(path), "-q"]) == 0
    assert "rows" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["training", "collectives"])
def test_missing_file_is_named(verb: str, capsys: Captured) -> None:
    assert main(["validate", verb, "--runs", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


def test_collectives_can_be_simulated_move_by_move(runs: str, capsys: Captured) -> None:
    assert main(["validate", "collectives", "--runs", runs, "--by", "simulation", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["by"] == "simulation"
    assert simulated["rows"][0]["predicted_us"] == pytest.approx(330, rel=0.3)
    assert main(["validate", "collectives", "--runs", runs, "--json"]) == 0
    formula = json.loads(capsys.readouterr().out)
    assert formula["rows"][0]["predicted_us"] != simulated["rows"][0]["predicted_us"]


def test_serving_answers_row_by_row(tmp_path: Path, capsys: Captured) -> None:
    row = {
        "source": "a page", "engine": "vLLM", "model": "Llama-3.1-8B", "gpu": "H100", "gpus": 1,
        "tp": 1, "isl": 512, "osl": 64, "precision_weights": "bf16",
        "concurrency_or_batch_or_rate": "concurrency 8", "output_tok_s": 800.0,
    }  # fmt: skip
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([row, {**row, "model": "nobody's"}]), encoding="utf-8")
    assert main(["validate", "serving", "--runs", str(runs), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first, second = data["rows"]
    assert first["predicted"]["output_tok_s"] > 0
    assert first["error"]["throughput"] is not None
    assert "nobody" in second["skipped"]
    assert data["summary"]["predicted"] == 1
    assert main(["validate", "serving", "--runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "1 skipped with a reason" in shown
    assert 'the shape of "nobody\'s" is not known\t1\n' in shown


def test_who_watches_serving_sees_how_far_it_is(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([{"source": "a page"}] * 3), encoding="utf-8")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.delenv("MESHWRIGHT_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["validate", "serving", "--runs", str(runs)]) == 0
    assert "predicting" in capsys.readouterr().err
    assert main(["validate", "serving", "--runs", str(runs), "--json"]) == 0
    assert "predicting" not in capsys.readouterr().err


def test_reasons_for_which_rows_of_serving_are_skipped_are_counted(
    tmp_path: Path, capsys: Captured
) -> None:
    row = {
        "engine": "vLLM", "model": "Llama-3.1-8B", "gpu": "H100", "gpus": 1, "isl": 512,
        "osl": 64, "concurrency_or_batch_or_rate": "concurrency 8",
    }  # fmt: skip
    unknown = [{**row, "model": name} for name in ("a", "b", "b")]
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([*unknown, {**row, "isl": None}]), encoding="utf-8")
    assert main(["validate", "serving", "--runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "the shape of … is not known\t3\nthe row does not say isl\t1\n" in shown


def test_serving_without_rows_is_a_fault(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "none.json"
    path.write_text("[]", encoding="utf-8")
    assert main(["validate", "serving", "--runs", str(path)]) == 2
    assert "there are no rows" in capsys.readouterr().err


def test_fleet_answers_one_row_for_each_statistic(tmp_path: Path, capsys: Captured) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "nodes.csv").write_text(
        "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\nA100,8,128,1\n",
        encoding="utf-8",
    )
    published = tmp_path / "facts.json"
    nodes = {"rows": 2, "gpus": 10, "by_model": {"A10": 1, "A100": 8, "H800": 4}}
    published.write_text(json.dumps({"alibaba_v2026_spot": {"nodes": nodes}}), encoding="utf-8")
    command = ["validate", "fleet", "--traces", str(traces)]
    assert main([*command, "--published", str(published), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.validate.fleet/2"
    rows = {row["name"].removeprefix("alibaba_v2026_spot.nodes."): row for row in answer["rows"]}
    assert rows["rows"]["agrees"] is True
    assert (rows["gpus"]["ours"], rows["gpus"]["agrees"]) == (9, False)
    assert rows["gpus"]["difference"] == pytest.approx(-0.1)
    assert rows["by_model.H800"]["ours"] is None
    assert answer["summary"]["overall"]["agree"] == 3
    assert main([*command, "--published", str(published)]) == 0
    assert "3 of 4 agree" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["rows"]
    assert {row["published"] for row in alone} == {None}
