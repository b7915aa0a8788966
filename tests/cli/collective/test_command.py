"""`mw collective`: algorithms listed, drawn, proved, simulated, exported and explained."""

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]
PRINTED = """
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  7 on  a device  0 [0000:8d:00] NVIDIA H100
#  Rank  1 Group  0 Pid  7 on  a device  1 [0000:91:00] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw  #wrong
        1024           256     float     sum      -1    {}    0.10    0.10       0
     1048576        262144     float     sum      -1    {}   34.95   34.95       0
"""
NODE = ["--cluster", "h100-superpod", "--gpus", "8"]


def answer(capsys: Captured, *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["collective", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Captured, *words: str) -> str:
    assert main(["collective", *words]) == 2
    return capsys.readouterr().err


def test_list_counts_steps_and_traffic(capsys: Captured) -> None:
    found = answer(capsys, "list", "--op", "allreduce", "--ranks", "8")
    ring = next(row for row in found["algorithms"] if row["name"] == "ring")
    assert ring["steps"] == 14
    assert ring["sent"] == pytest.approx(14 / 8)
    assert {row["op"] for row in found["algorithms"]} == {"all_reduce"}


def test_show_writes_each_move_as_an_arrow(tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "ring.svg"
    found = answer(capsys, "show", "ring", "--ranks", "4", "--svg", str(picture))
    assert (found["steps"], found["moves"]) == (6, 24)
    drawn = ET.parse(picture).getroot()
    arrows = [e for e in drawn.iter() if e.tag.endswith("path") and "marker-end" in e.attrib]
    assert len(arrows) == 24


def test_show_names_the_links_of_a_cluster(tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "loads.svg"
    found = answer(capsys, "show", "ring", *NODE, "--loads", str(picture))
    assert found["schema"] == "meshwright.collective.show/2"
    alike = {link["link"]: link["num_links"] for link in found["links"]}
    assert alike == {"gpu0→nvswitch0": 8, "nvswitch0→gpu0": 8}
    assert "gpu0→nvswitch0" in picture.read_text(encoding="utf-8")


def test_verify_proves_one_algorithm(capsys: Captured) -> None:
    found = answer(capsys, "verify", "double-tree", "--ranks", "100")
    assert found["sound"] is True
    assert found["same_everywhere"] is True


def test_verify_proves_the_whole_library(capsys: Captured) -> None:
    found = answer(capsys, "verify", "--ranks", "12", "--per-node", "4")
    assert found["proved"] > 40
    assert not [row for row in found["rows"] if row["sound"] is False]


def test_a_file_that_loses_a_contribution_is_refuted(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ring.json"
    answer(capsys, "export", "ring", "--ranks", "4", "--to", "json", "--out", str(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    data["sweeps"][0]["moves"].pop()
    path.write_text(json.dumps(data), encoding="utf-8")
    found = answer(capsys, "verify", str(path), code=1)
    problem = found["problems"][0]
    assert problem["where"].startswith("rank 0, after step 5")
    assert "lacks chunk" in problem["what"]


def test_msccl_programs_are_written_and_judged(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ring.xml"
    answer(capsys, "export", "ring", "--ranks", "4", "--to", "msccl-xml", "--out", str(path))
    assert answer(capsys, "verify", str(path))["sound"] is True
    assert answer(capsys, "show", str(path))["ranks"] == 4


def test_an_msccl_program_that_deadlocks_shows_the_circle(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ring.xml"
    answer(capsys, "export", "ring", "--ranks", "2", "--to", "msccl-xml", "--out", str(path))
    tree = ET.parse(path)
    # Each rank now first waits for what the other would send later.
    for block in tree.getroot().iter("tb"):
        steps = list(block)
        for step in steps:
            block.remove(step)
        for number, step in enumerate(reversed(steps)):
            step.set("s", str(number))
            block.append(step)
    tree.write(path)
    found = answer(capsys, "verify", str(path), code=1)
    said = found["problems"][0]["what"]
    assert "deadlock" in said
    assert "rank 0, lane 0, step 0" in said
    assert "waits for rank 1, lane 0, step 0" in said


def test_mscclpp_plans_name_every_gpu(capsys: Captured) -> None:
    text = answer(capsys, "export", "two_shot", "--ranks", "4", "--to", "mscclpp-json")["text"]
    assert [gpu["id"] for gpu in json.loads(text)["gpus"]] == [0, 1, 2, 3]


def test_tuner_files_name_channels(capsys: Captured) -> None:
    text = answer(capsys, "export", "--to", "nccl-tuner", *NODE)["text"]
    rows = [line.split(",") for line in text.splitlines() if line[0] != "#"]
    assert {row[0] for row in rows} >= {"allreduce", "allgather", "reducescatter"}
    assert all(int(row[5]) > 0 for row in rows)


def test_simulate_names_the_bottleneck(tmp_path: Path, capsys: Captured) -> None:
    trace = tmp_path / "moves.json.gz"
    found = answer(capsys, "simulate", "ring", *NODE, "--size", "64MiB", "--timeline", str(trace))
    assert found["seconds"] >= found["bound_s"] > 0
    assert "nvswitch0" in found["bottleneck"]
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_simulate_compares_what_does_the_operation(capsys: Captured) -> None:
    found = answer(capsys, "simulate", *NODE, "--op", "all_gather", "--size", "1MiB")
    times = [row["seconds"] for row in found["results"]]
    assert times == sorted(times)
    assert {"ring", "direct"} <= {row["algorithm"] for row in found["results"]}


def test_simulate_runs_what_nccl_would(capsys: Captured) -> None:
    found = answer(capsys, "simulate", "nccl", *NODE, "--size", "64MiB")
    assert found["algorithm"] == "nvls"


def test_a_dead_gpu_is_planned_around(capsys: Captured) -> None:
    found = answer(capsys, "simulate", *NODE, "--kill", "gpu3", "--size", "16MiB")
    assert found["ranks"] == [0, 1, 2, 4, 5, 6, 7]
    assert found["after"]["ranks"] == 7


def test_synthesis_meets_the_bound_of_a_node(capsys: Captured) -> None:
    found = answer(capsys, "synthesize", *NODE, "--op", "all_gather")
    assert found["sound"] is True
    assert found["of_bound"] == pytest.approx(1, abs=0.01)


def test_explain_says_why(capsys: Captured) -> None:
    assert main(["collective", "explain", "--cluster", "h100-superpod", "--gpus", "16"]) == 0
    said = capsys.readouterr().out
    assert "picks Tree/LL up to" in said
    found = answer(capsys, "explain", *NODE, "--size", "1MiB")
    assert found["candidates"][0]["algorithm"] == "ring"


def test_rings_come_from_a_graph_dump(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "graph.xml"
    gpus = "".join(f'<gpu dev="{gpu}" rank="{gpu}"/>' for gpu in (0, 2, 1, 3))
    path.write_text(
        '<graphs version="1"><graph id="0" pattern="4" crossnic="0" nchannels="1" '
        'speedintra="20" speedinter="20" latencyinter="0" typeintra="NVL" typeinter="PIX" '
        f'samechannels="1"><channel>{gpus}</channel></graph></graphs>',
        encoding="utf-8",
    )
    found = answer(capsys, "show", "ring", "--graph", str(path))
    assert found["ranks"] == 4
    assert "0⊕→2" in found["shown_steps"][0]["what"]


def test_tuner_files_come_from_nccl_tests(tmp_path: Path, capsys: Captured) -> None:
    given = []
    for name, times in (("ring/simple/16", (20, 30)), ("tree/ll/8", (10, 45))):
        path = tmp_path / f"{name[:4]}.log"
        path.write_text(PRINTED.format(*times), encoding="utf-8")
        given += ["--measured", f"{name}={path}"]
    text = answer(capsys, "export", "--to", "nccl-tuner", *given)["text"]
    rows = [line.split(",")[:6] for line in text.splitlines() if line[0] != "#"]
    assert rows[0][3:] == ["tree", "ll", "8"]
    assert ["ring", "simple", "16"] in [row[3:] for row in rows]


@pytest.mark.parametrize("name", ["ring", "one_shot"])
def test_bench_runs_and_counts_wrong_elements(name: str, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("torch", reason="running collectives needs torch")
    picture = tmp_path / "bench.svg"
    sizes = ["--minbytes", "4KiB", "--maxbytes", "16KiB", "--iters", "2"]
    found = answer(capsys, "bench", name, "--ranks", "2", *sizes, "--plot", str(picture))
    assert found["wrong"] == 0
    assert {row["algorithm"] for row in found["rows"]} == {"native", name}
    assert {row["size_bytes"] for row in found["rows"]} == {4096, 16384}
    assert all(row["busbw_gbps"] > 0 for row in found["rows"])
    assert "bus bandwidth" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("show", "rign"), "did you mean ring"),
        (("show", "ring", "--op", "all_to_all"), "ring does no all_to_all"),
        (("verify", "ring", "--ranks", "0"), "use 1 or more"),
        (("show", "direct", "--op", "send_recv", "--peers", "1,x"), "no list of ranks"),
        (("export", "--to", "nccl-tuner", "--measured", "ring=x.log"), "ring/simple/16"),
        (("simulate", "ring"), "--cluster"),
        (("simulate", *NODE, "--size", "0"), "no message"),
        (("simulate", *NODE, "--kill", "gpu9"), "gpu9"),
        (("simulate", *NODE, "--kill", "gpu0~gpu1"), "not linked"),
        (("export", "--to", "json"), "needs an algorithm"),
        (("explain", *NODE, "--op", "gather"), "NCCL has no gather"),
        (("explain", *NODE, "--only", "rings"), "did you mean ring"),
        (("list", "--op", "allredcue"), "all_reduce"),
        (("show", "pairwise", "--op", "all_to_all_v", "--counts", "[[1"), "no matrix"),
        (("bench", "rign"), "did you mean ring"),
        (("list", "--per-node", "0"), "--per-node"),
        (("verify", "--per-node", "x"), "--per-node"),
        (("verify", "--ranks", "0"), "use 1 or more"),
        (("simulate", "ring", *NODE, "--parts", "0"), "--parts"),
        (("simulate", "ring", *NODE, "--out", "x.json"), "goes with --kill"),
        (("simulate", "nccl", *NODE, "--timeline", "x.json"), "mw collective list"),
        (("show", "pairwise", "--op", "all_to_all_v", "--counts", "[[0,1.7],[1,0]]"), "no matrix"),
        (("verify", "ring", "--peers", "1,0"), "peers"),
        (("bench", "--op", "all_to_all_v"), "all_to_all instead"),
        (("bench", "ring", "--ranks", "1000"), "use 2 to 64"),
        (("bench", "ring", "--op", "all_to_all"), "ring does no all_to_all"),
        (("simulate", *NODE, "--op", "send_recv"), "name an algorithm"),
        (("export", "ring", "--to", "nccl-tuner", *NODE), "--only"),
        (("show", "ring", "--svg", "x.pdf"), "end it in .svg"),
    ],
)
def test_bad_input_names_the_fault(words: tuple[str, ...], fault: str, capsys: Captured) -> None:
    assert fault in refused(capsys, *words)


def test_flags_beside_a_file_are_refused(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ring.json"
    answer(capsys, "export", "ring", "--ranks", "4", "--to", "json", "--out", str(path))
    assert "--ranks" in refused(capsys, "verify", str(path), "--ranks", "99")


def test_an_unsound_file_is_not_simulated(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ring.json"
    answer(capsys, "export", "ring", "--ranks", "4", "--to", "json", "--out", str(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    data["sweeps"][0]["moves"].pop()
    path.write_text(json.dumps(data), encoding="utf-8")
    assert "lacks chunk" in refused(capsys, "simulate", str(path), *NODE)


def test_the_root_of_an_msccl_program_is_given(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "binomial.xml"
    words = ["--op", "broadcast", "--root", "2", "--ranks", "4"]
    answer(capsys, "export", "binomial", *words, "--to", "msccl-xml", "--out", str(path))
    assert answer(capsys, "show", str(path), "--root", "2")["op"] == "broadcast"


def test_a_gpu_cut_off_is_named(capsys: Captured) -> None:
    parts = ["--kill", "gpu2~nvswitch0", "--kill", "gpu2~node0.pcie2"]
    assert "gpu2" in refused(capsys, "simulate", *NODE, *parts)


def test_a_dead_node_leaves_the_others(capsys: Captured) -> None:
    words = ["--cluster", "h100-superpod", "--gpus", "16", "--size", "1MiB"]
    found = answer(capsys, "simulate", *words, "--kill", "node1")
    assert found["ranks"] == list(range(8))


def test_an_algorithm_runs_on_what_is_left(capsys: Captured) -> None:
    words = ["simulate", "two_shot", "--cluster", "azure-nd-mi300x-v5", "--gpus", "8"]
    whole = answer(capsys, *words)
    damaged = answer(capsys, *words, "--kill", "gpu0~gpu1")
    assert damaged["seconds"] > 1.5 * whole["seconds"]


def test_a_file_of_ones_own_is_benched(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("torch", reason="running collectives needs torch")
    path = tmp_path / "mine.json"
    answer(capsys, "export", "ring", "--ranks", "2", "--to", "json", "--out", str(path))
    sizes = ["--minbytes", "4KiB", "--maxbytes", "4KiB", "--iters", "1", "--no-baseline"]
    assert answer(capsys, "bench", str(path), "--ranks", "2", *sizes)["wrong"] == 0
    assert "--ranks 2" in refused(capsys, "bench", str(path), "--ranks", "3")


def test_nccls_own_spelling_is_understood(capsys: Captured) -> None:
    found = answer(capsys, "explain", *NODE, "--only", "Ring,NVLSTree")
    assert {part["algorithm"] for part in found["segments"]} == {"ring"}
