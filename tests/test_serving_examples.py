"""Examples for clusters: manifests that can be read, flags that exist, metrics that are told."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import yaml

from meshwright.cli.command_registry import COMMANDS
from meshwright.cli.parser import build_parser

FOLDER = Path(__file__).parents[1] / "examples" / "serving"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _commands(value: object) -> list[list[str]]:
    """Return the arguments of every container, wherever it stands."""
    if isinstance(value, dict):
        own = [value["args"]] if "args" in value else []
        return own + [found for inner in value.values() for found in _commands(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in _commands(inner)]
    return []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_document_is_an_object_of_a_cluster(path: Path) -> None:
    for document in _documents(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        assert document["metadata"]["name"]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kserve.yaml"])
def test_containers_start_a_server_with_flags_that_there_are(name: str) -> None:
    (command,) = _commands(_documents(FOLDER / name))
    assert command[:2] == ["mw", "serve"]
    args = build_parser("serve", COMMANDS).parse_args(command[1:])
    assert (args.host, args.model is not None) == ("0.0.0.0", True)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kserve.yaml"])
def test_pods_live_longer_than_the_server_drains(name: str) -> None:
    documents = _documents(FOLDER / name)
    (command,) = _commands(documents)
    drain_s = float(build_parser("serve", COMMANDS).parse_args(command[1:]).shutdown_timeout)
    pause_s = sum(_found(documents, "sleep"), start=drain_s)
    (grace_s,) = _found(documents, "terminationGracePeriodSeconds")
    assert grace_s > pause_s + 10, "the last words, and the engine's end"


def _found(value: object, name: str) -> list[float]:
    """Return the numbers under a name, wherever it stands."""
    if isinstance(value, dict):
        own = value.get(name, [])
        own = own.values() if isinstance(own, dict) else [own] if name in value else []
        return [*own, *(found for inner in value.values() for found in _found(inner, name))]
    if isinstance(value, list):
        return [found for inner in value for found in _found(inner, name)]
    return []


def test_selectors_find_the_pods_on_the_port_they_have() -> None:
    by_kind = {d["kind"]: d["spec"] for path in MANIFESTS for d in _documents(path)}
    pod = by_kind["Deployment"]["template"]
    labels = pod["metadata"]["labels"].items()
    (port,) = pod["spec"]["containers"][0]["ports"]
    for kind in ("Deployment", "InferencePool", "PodMonitor"):
        assert by_kind[kind]["selector"]["matchLabels"].items() <= labels
    assert by_kind["Service"]["selector"].items() <= labels
    assert by_kind["InferencePool"]["targetPorts"] == [{"number": port["containerPort"]}]
    assert by_kind["Service"]["ports"][0]["targetPort"] == port["name"]
    assert by_kind["PodMonitor"]["podMetricsEndpoints"][0]["port"] == port["name"]


def test_the_dashboard_asks_for_metrics_that_the_server_tells() -> None:
    pytest.importorskip("prometheus_client", reason="the server's metrics need meshwright[serve]")
    from meshwright.run.serve.server.metrics import ServerMetrics
    from tests.run.serve.server.pretend import PretendEngine

    figures = ServerMetrics(PretendEngine(), "parrot")
    figures.http_statuses["POST", "/v1/completions", "200"] += 1
    told = {sample.name for metric in figures.collect() for sample in metric.samples}
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|meshwright):\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= told


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_ray_example_imports_what_there_is() -> None:
    pytest.importorskip("torch", reason="the engine needs torch")
    tree = ast.parse((FOLDER / "ray_serve.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright"):
            module = __import__(node.module or "", fromlist=["*"])
            for name in node.names:
                assert getattr(module, name.name)


def test_the_ray_example_answers_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its folder's whole name, with vectors, and as the model's makers would draw."""
    pytest.importorskip("torch", reason="the engine needs torch")
    pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.serve.server import BackgroundServer, ServerConfig
    from tests.run.serve.model.small import made, small
    from tests.run.serve.model.test_gguf import trained
    from tests.run.serve.server.wire import send

    folder = tmp_path / "llama-3.1-tiny"
    folder.mkdir()
    tokenizer = trained(digits=True)
    save_hf_checkpoint(
        made(msgspec.structs.replace(small().model, vocab=tokenizer.get_vocab_size())), folder
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25}')
    ray = MagicMock()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("MESHWRIGHT_MODEL", str(folder))
    runpy.run_path(str(FOLDER / "ray_serve.py"))
    (answering,) = ray.serve.ingress.call_args.args
    app = answering()
    assert app.state.desk.config.default_sampling_params.temperature == 0.25
    with BackgroundServer(app, ServerConfig(model="served", port=0)) as served:
        (card,) = send(served.url, "/v1/models").json["data"]
        assert card["id"] == "llama-3.1-tiny"
        got = send(served.url, "/v1/embeddings", {"input": "ab"})
        assert (got.status, len(got.json["data"])) == (200, 1)
