import json
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.metrics import HistogramCounter, build_decade_buckets
from meshwright.run.serve.server.tracing import RequestTracer, tracer_from_environment
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.serving import serving, until
from tests.run.serve.server.wire import opened, send

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def families(served: BackgroundServer) -> dict[str, Any]:
    """What Prometheus reads after three requests."""
    for body in ({"prompt": "hello"}, {"prompt": "hello", "stream": True}, {"prompt": 1}):
        send(served.url, TEXT, body)
    page = send(served.url, "/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm:num_requests_running", "gauge"),
        ("vllm:num_requests_waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:prompt_tokens", "counter"),
        ("vllm:generation_tokens", "counter"),
        ("vllm:prefix_cache_queries", "counter"),
        ("vllm:prefix_cache_hits", "counter"),
        ("vllm:num_preemptions", "counter"),
        ("vllm:request_success", "counter"),
        ("vllm:time_to_first_token_seconds", "histogram"),
        ("vllm:inter_token_latency_seconds", "histogram"),
        ("vllm:time_per_output_token_seconds", "histogram"),
        ("vllm:request_time_per_output_token_seconds", "histogram"),
        ("vllm:e2e_request_latency_seconds", "histogram"),
        ("vllm:request_queue_time_seconds", "histogram"),
        ("vllm:request_inference_time_seconds", "histogram"),
        ("vllm:request_prefill_time_seconds", "histogram"),
        ("vllm:request_decode_time_seconds", "histogram"),
        ("vllm:request_prompt_tokens", "histogram"),
        ("vllm:request_generation_tokens", "histogram"),
        ("vllm:request_params_n", "histogram"),
        ("vllm:request_params_max_tokens", "histogram"),
        ("vllm:engine_sleep_state", "gauge"),
        ("vllm:cache_config_info", "gauge"),
        ("vllm:lora_requests_info", "gauge"),
    ],
)
def test_dashboards_find_their_names(families: dict[str, Any], name: str, kind: str) -> None:
    assert families[name].type == kind
    labels = families[name].samples[0].labels
    assert (labels["model_name"], labels["engine"]) == ("parrot", "0")


def states(served: BackgroundServer, name: str) -> list[Any]:
    """Return what one figure's samples are at this moment."""
    page = send(served.url, "/metrics").body.decode()
    found = [one for one in text_string_to_metric_families(page) if one.name == name]
    return found[0].samples if found else []


def test_endpoint_pickers_find_how_large_the_cache_is(served: BackgroundServer) -> None:
    (told,) = states(served, "vllm:cache_config_info")
    assert told.value == 1
    facts = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
    assert [told.labels[name] for name in facts] == ["8", "16", "False"]


def test_endpoint_pickers_find_whose_adapters_run(
    served: BackgroundServer, engine: PretendEngine
) -> None:
    (idle,) = states(served, "vllm:lora_requests_info")
    assert idle.value == pytest.approx(time.time(), abs=60), "the latest labels are the true ones"
    names = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
    assert [idle.labels[name] for name in names] == ["", "", "1"]
    engine.held = True
    with opened(served.url, TEXT, {"model": "polly", "prompt": "hello", "stream": True}):
        until(lambda: engine.running)
        (busy,) = states(served, "vllm:lora_requests_info")
        assert busy.labels["running_lora_adapters"] == "polly"
        engine.held = False
    until(lambda: not engine.running)


def test_dashboards_see_an_engine_that_sleeps(
    served: BackgroundServer, engine: PretendEngine
) -> None:
    def state() -> list[str]:
        samples = states(served, "vllm:engine_sleep_state")
        assert [one.labels["sleep_state"] for one in samples] == [
            *("awake", "weights_offloaded", "discard_all")
        ]
        return [one.labels["sleep_state"] for one in samples if one.value == 1]

    assert state() == ["awake"]
    engine.sleeps = True
    for engine.level, told in ((1, "weights_offloaded"), (2, "discard_all")):
        assert state() == [told]
    engine.sleeps = False


def test_what_is_not_there_is_not_told() -> None:
    class Dead(PretendEngine):
        def stats(self) -> EngineStats:
            return EngineStats()

    settings = ServerConfig(model="parrot", port=0)
    with BackgroundServer(create_app(Dead(), Bytes(), settings), settings) as served:
        assert not states(served, "vllm:cache_config_info")
        assert not states(served, "vllm:lora_requests_info"), "it has no adapters"


def value(families: dict[str, Any], name: str, sample: str, **labels: str) -> float:
    """Return one figure."""
    (found,) = [
        one.value
        for one in families[name].samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    return float(found)


def test_requests_and_tokens_are_counted(families: dict[str, Any]) -> None:
    def count(name: str) -> float:
        return value(families, name, f"{name}_count")

    assert count("vllm:time_to_first_token_seconds") == 2
    assert count("vllm:inter_token_latency_seconds") == 12  # seven tokens each, but the first
    assert count("vllm:request_queue_time_seconds") == 2
    assert (
        value(families, "vllm:request_queue_time_seconds", "vllm:request_queue_time_seconds_sum")
        == 0.002
    )
    name = "vllm:request_generation_tokens"
    assert value(families, name, f"{name}_sum") == 14
    assert value(families, name, f"{name}_bucket", le="5.0") == 0
    assert value(families, name, f"{name}_bucket", le="10.0") == 2
    assert value(families, name, f"{name}_bucket", le="+Inf") == 2
    ends = "vllm:request_success_total"
    assert value(families, "vllm:request_success", ends, finished_reason="stop") == 2
    name = "meshwright:http_requests"
    assert value(families, name, f"{name}_total", path=TEXT, status="200") == 2
    assert value(families, name, f"{name}_total", path=TEXT, status="400") == 1


def test_a_request_that_fails_before_its_first_token_has_no_time_to_it() -> None:
    with serving() as (served, engine):
        for fails_at, status in ((0, 500), (-1, 200)):
            engine.fails_at = fails_at
            assert send(served.url, TEXT, {"prompt": "a"}).status == status
        page = send(served.url, "/metrics").body.decode()
        found = {one.name: one for one in text_string_to_metric_families(page)}
        name = "vllm:time_to_first_token_seconds"
        assert value(found, name, f"{name}_count") == 1
        ends = "vllm:request_success"
        assert value(found, ends, f"{ends}_total", finished_reason="error") == 1


def test_one_engine_is_one_of_one_that_is_well(families: dict[str, Any]) -> None:
    for name in ("meshwright:engines", "meshwright:engines_healthy", "meshwright:healthy"):
        assert value(families, name, name) == 1


def test_an_engines_own_figures_are_shown_where_they_are_numbers(families: dict[str, Any]) -> None:
    assert value(families, "meshwright:spare_blocks", "meshwright:spare_blocks") == 7
    assert not [name for name in families if "odd" in name or "words" in name]


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"]
)
def test_names_keep_their_colons_whatever_a_scraper_takes(
    served: BackgroundServer, accept: str
) -> None:
    got = send(served.url, "/metrics", headers={"accept": accept})
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"\nvllm:num_requests_running{" in got.body
    assert b"vllm_" not in got.body


def test_a_bound_is_within_its_range() -> None:
    tally = HistogramCounter((1.0, 2.0))
    for one in (0.5, 1.0, 1.5, 2.0, 9.0):
        tally.observe(one)
    assert tally.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert build_decade_buckets(50) == (1, 2, 5, 10, 20, 50)
    assert build_decade_buckets(3) == (1, 2)


def test_a_request_is_a_span_beneath_its_clients() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="traces need meshwright[traces]")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    settings = ServerConfig(model="parrot", port=0)
    engine = PretendEngine()
    app = create_app(engine, Bytes(), settings, spans=RequestTracer(provider))
    trace = "0af7651916cd43dd8448eb211c80319c"
    with BackgroundServer(app, settings) as served:
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        send(served.url, TEXT, {"prompt": "secret"}, headers=headers)
        send(served.url, TEXT, {"prompt": 1})
        engine.fails_at = 3
        send(served.url, TEXT, {"prompt": "hello", "stream": True})
    first, second, third = kept.get_finished_spans()
    assert first.context is not None
    assert f"{first.context.trace_id:032x}" == trace
    told = dict(first.attributes or {})
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.request.max_tokens"] == 16
    assert told["gen_ai.response.model"] == "parrot"
    assert "secret" not in json.dumps(told)
    assert "error.type" not in told
    assert "gen_ai.usage.input_tokens" not in (second.attributes or {})
    assert (second.attributes or {})["error.type"] == "invalid_type"
    assert second.status.is_unset, "a slip of the client is no error of ours"
    assert (third.attributes or {})["error.type"] == "engine_error"
    assert (third.status.is_ok, third.status.description) == (False, "the cat was at it")


def test_no_traces_are_made_unless_somebody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer_from_environment() is None
    pytest.importorskip("opentelemetry.sdk", reason="traces need meshwright[traces]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert isinstance(tracer_from_environment(), RequestTracer)
