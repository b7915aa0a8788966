"""What Prometheus is told, under the names that dashboards made for vLLM ask for.

Counts are kept in plain lists, which costs a token a third of a microsecond; the exposition is
made of them when somebody asks.
"""

import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from meshwright.run.serve.engine_client import EngineClient, SleepableEngine
from meshwright.run.serve.engine_stats import STEP_SIZE_BUCKETS, EngineStats

# The bounds that vLLM's metrics have, so that panels of quantiles read alike.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level of sleep."""
LABEL_NAME_PATTERN = re.compile(r"[a-z_][a-z0-9_]*")


def build_decade_buckets(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to a number."""
    bounds: list[float] = []
    power = 1
    while power <= most:
        bounds += [float(step * power) for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(bounds)


class HistogramCounter:
    """A histogram: how many values lie in each of its ranges, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bounds with how many values lie at or below each."""
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), running))
        return rows


class ServerMetrics(Collector):
    """Everything that is counted, and what the engine says of itself."""

    def __init__(self, engine: EngineClient, model: str, adapters: Sequence[str] = ()) -> None:
        self._engine, self._adapters = engine, adapters
        self._labels = (model, "0")
        lengths = build_decade_buckets(engine.max_model_len)
        self.time_to_first_token = HistogramCounter(TTFT_BUCKETS)
        self.inter_token_latency = HistogramCounter(ITL_BUCKETS)
        self.time_per_output_token = HistogramCounter(ITL_BUCKETS)
        self.e2e_latency = HistogramCounter(LATENCY_BUCKETS)
        self.queue_time = HistogramCounter(LATENCY_BUCKETS)
        self.inference_time = HistogramCounter(LATENCY_BUCKETS)
        self.prefill_time = HistogramCounter(LATENCY_BUCKETS)
        self.decode_time = HistogramCounter(LATENCY_BUCKETS)
        self.prompt_tokens = HistogramCounter(lengths)
        self.generation_tokens = HistogramCounter(lengths)
        self.max_generation_tokens = HistogramCounter(lengths)
        self.max_tokens_param = HistogramCounter(lengths)
        self.n_param = HistogramCounter(N_BUCKETS)
        self.finish_reasons: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.http_statuses: Counter[tuple[str, str, str]] = Counter()
        self.requests_in_progress = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type, which every scraper takes.

        In OpenMetrics the library writes `vllm_` for `vllm:` where a scraper does not ask for names
        in UTF-8, and dashboards would find nothing.
        """
        encode, kind = choose_encoder("text/plain; version=0.0.4")
        return encode(self._registry), kind

    def describe(self) -> Iterable[Metric]:
        """Promise no names beforehand: the registry has no other collector to clash with."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Return every metric as it stands."""
        gauges = self._engine.stats()
        yield from self._gauges(gauges)
        yield from self._states(gauges)
        yield from self._counters(gauges)
        for name, help_text, tally in self._tallies():
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            family.add_metric(self._labels, tally.buckets(), tally.sum)
            yield family
        steps = HistogramCounter(STEP_SIZE_BUCKETS)
        steps.counts, steps.sum = list(gauges.step_sizes) or steps.counts, gauges.step_tokens
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Number of tokens per engine step.", labels=LABELS
        )
        family.add_metric(self._labels, steps.buckets(), steps.sum)
        yield family

    def _gauges(self, gauges: EngineStats) -> Iterator[Metric]:
        healthy = 0 if self._engine.health_problem() else 1
        rows = [
            (
                "vllm:num_requests_running",
                "Number of running requests.",
                gauges.running,
            ),
            ("vllm:num_requests_waiting", "Number of waiting requests.", gauges.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "KV cache usage: 1 means that all blocks are used.",
                gauges.kv_cache_usage,
            ),
            (
                "meshwright:healthy",
                "1 while at least one engine is healthy, else 0.",
                healthy,
            ),
            ("meshwright:engines", "Number of engines.", gauges.engines),
            (
                "meshwright:engines_healthy",
                "Number of healthy engines.",
                healthy if gauges.healthy_engines is None else gauges.healthy_engines,
            ),
            (
                "meshwright:requests_in_progress",
                "Number of requests in progress in the server.",
                self.requests_in_progress,
            ),
        ]
        rows += [
            (f"meshwright:{name}", f"Engine statistic {name}.", value)
            for name, value in gauges.extra.items()
            if isinstance(value, int | float) and LABEL_NAME_PATTERN.fullmatch(name)
        ]
        for name, help_text, value in rows:
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            gauge.add_metric(self._labels, float(value))
            yield gauge

    def _states(self, gauges: EngineStats) -> Iterator[Metric]:
        """Return what endpoint pickers read from labels (llm-d, Gateway API's extension)."""
        slept = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Engine sleep state: awake, sleep level 1 or sleep level 2.",
            labels=(*LABELS, "sleep_state"),
        )
        level = self._engine.sleep_level() if isinstance(self._engine, SleepableEngine) else 0
        for place, state in enumerate(SLEEP_STATES):
            slept.add_metric((*self._labels, state), float(place == level))
        yield slept
        if gauges.num_gpu_blocks:
            told = {
                "block_size": str(gauges.block_size),
                "num_gpu_blocks": str(gauges.num_gpu_blocks),
                "enable_prefix_caching": str(gauges.enable_prefix_caching),
            }
            cache = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Configuration of the KV cache.",
                labels=(*LABELS, *told),
            )
            cache.add_metric((*self._labels, *told.values()), 1.0)
            yield cache
        if self._adapters:
            used = {
                "max_lora": str(len(self._adapters)),
                "running_lora_adapters": ",".join(gauges.running_adapters),
                "waiting_lora_adapters": ",".join(gauges.waiting_adapters),
            }
            lora = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Running and waiting LoRA adapters; the value is the time of the scrape.",
                labels=(*LABELS, *used),
            )
            lora.add_metric((*self._labels, *used.values()), time.time())
            yield lora

    def _counters(self, gauges: EngineStats) -> Iterator[Metric]:
        rows = [
            ("vllm:prompt_tokens", "Number of prefill tokens.", gauges.prompt_tokens),
            ("vllm:generation_tokens", "Number of generation tokens.", gauges.output_tokens),
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in tokens.",
                gauges.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", gauges.prefix_hits),
            (
                "vllm:prompt_tokens_cached",
                "Number of prompt tokens from the prefix cache.",
                gauges.prefix_hits,
            ),
            ("vllm:num_preemptions", "Number of preemptions.", gauges.preemptions),
            ("meshwright:engine_steps", "Number of engine steps.", gauges.steps),
            ("vllm:spec_decode_num_drafts", "Number of verified drafts.", gauges.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", gauges.draft_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Number of accepted draft tokens.",
                gauges.accepted_tokens,
            ),
        ]
        for name, help_text, value in rows:
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric(self._labels, float(value))
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success",
            "Number of finished requests by finish reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in self.finish_reasons.items():
            ends.add_metric((*self._labels, reason), count)
        yield ends
        answers = CounterMetricFamily(
            "meshwright:http_requests",
            "Number of HTTP responses.",
            labels=("method", "path", "status"),
        )
        for told, count in self.http_statuses.items():
            answers.add_metric(told, count)
        yield answers

    def _tallies(self) -> list[tuple[str, str, HistogramCounter]]:
        return [
            (
                "time_to_first_token_seconds",
                "Time to first token in seconds.",
                self.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Inter-token latency in seconds.",
                self.inter_token_latency,
            ),
            (
                "time_per_output_token_seconds",
                "Inter-token latency in seconds (former name).",
                self.inter_token_latency,
            ),
            (
                "request_time_per_output_token_seconds",
                "Mean time per output token of a request after the first one, in seconds.",
                self.time_per_output_token,
            ),
            (
                "e2e_request_latency_seconds",
                "End-to-end request latency in seconds.",
                self.e2e_latency,
            ),
            (
                "request_queue_time_seconds",
                "Time in the waiting queue in seconds.",
                self.queue_time,
            ),
            (
                "request_inference_time_seconds",
                "Time in the running state in seconds.",
                self.inference_time,
            ),
            (
                "request_prefill_time_seconds",
                "Time of the prefill phase in seconds.",
                self.prefill_time,
            ),
            (
                "request_decode_time_seconds",
                "Time of the decode phase in seconds.",
                self.decode_time,
            ),
            ("request_prompt_tokens", "Number of prompt tokens of a request.", self.prompt_tokens),
            (
                "request_generation_tokens",
                "Number of generation tokens of a request.",
                self.generation_tokens,
            ),
            (
                "request_max_num_generation_tokens",
                "Largest number of generation tokens of a request's completions.",
                self.max_generation_tokens,
            ),
            ("request_params_max_tokens", "`max_tokens` of a request.", self.max_tokens_param),
            ("request_params_n", "`n` of a request.", self.n_param),
        ]
