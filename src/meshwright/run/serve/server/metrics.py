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

from meshwright.run.serve.asked import STEP_SIZES, Gauges
from meshwright.run.serve.interface import Serves, Sleeps

# The bounds that vLLM's metrics have, so that panels of quantiles read alike.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
LABELS = ("model_name", "engine")
ENDS = ("stop", "length", "abort", "error")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level of sleep."""
PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")


def one_two_five(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to a number."""
    bounds: list[float] = []
    power = 1
    while power <= most:
        bounds += [float(step * power) for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(bounds)


class Tally:
    """A histogram: how many values lie in each of its ranges, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
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


class Figures(Collector):
    """Everything that is counted, and what the engine says of itself."""

    def __init__(self, engine: Serves, model: str, adapters: Sequence[str] = ()) -> None:
        self._engine, self._adapters = engine, adapters
        self._labels = (model, "0")
        lengths = one_two_five(engine.max_length)
        self.first_token = Tally(FIRST_TOKEN_S)
        self.next_token = Tally(NEXT_TOKEN_S)
        self.mean_token = Tally(NEXT_TOKEN_S)
        self.whole = Tally(REQUEST_S)
        self.queued = Tally(REQUEST_S)
        self.inference = Tally(REQUEST_S)
        self.prefill = Tally(REQUEST_S)
        self.decode = Tally(REQUEST_S)
        self.prompt_length = Tally(lengths)
        self.answer_length = Tally(lengths)
        self.longest_answer = Tally(lengths)
        self.asked_length = Tally(lengths)
        self.choices = Tally(CHOICES)
        self.ends: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.statuses: Counter[tuple[str, str, str]] = Counter()
        self.under_way = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> tuple[bytes, str]:
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
        gauges = self._engine.gauges()
        yield from self._gauges(gauges)
        yield from self._states(gauges)
        yield from self._counters(gauges)
        for name, help_text, tally in self._tallies():
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            family.add_metric(self._labels, tally.buckets(), tally.sum)
            yield family
        steps = Tally(STEP_SIZES)
        steps.counts, steps.sum = list(gauges.step_sizes) or steps.counts, gauges.step_tokens
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step of the engine.", labels=LABELS
        )
        family.add_metric(self._labels, steps.buckets(), steps.sum)
        yield family

    def _gauges(self, gauges: Gauges) -> Iterator[Metric]:
        healthy = 0 if self._engine.ill() else 1
        rows = [
            (
                "vllm:num_requests_running",
                "Requests that have a place in the engine.",
                gauges.running,
            ),
            ("vllm:num_requests_waiting", "Requests that wait for a place.", gauges.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the blocks of keys and values that requests hold, from 0 to 1.",
                gauges.kv_usage,
            ),
            (
                "meshwright:healthy",
                "1 while requests are answered, 0 while no engine makes progress.",
                healthy,
            ),
            ("meshwright:engines", "Engines that share the requests.", gauges.engines),
            (
                "meshwright:engines_well",
                "Those of them that make progress.",
                healthy if gauges.well is None else gauges.well,
            ),
            ("meshwright:requests_under_way", "Requests that the server works on.", self.under_way),
        ]
        rows += [
            (f"meshwright:{name}", f"The engine's figure {name}.", value)
            for name, value in gauges.more.items()
            if isinstance(value, int | float) and PLAIN_NAME.fullmatch(name)
        ]
        for name, help_text, value in rows:
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            gauge.add_metric(self._labels, float(value))
            yield gauge

    def _states(self, gauges: Gauges) -> Iterator[Metric]:
        """Return what endpoint pickers read from labels (llm-d, Gateway API's extension)."""
        slept = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state it is in: the last two are sleep of level 1 and 2.",
            labels=(*LABELS, "sleep_state"),
        )
        level = self._engine.sleep_level() if isinstance(self._engine, Sleeps) else 0
        for place, state in enumerate(SLEEP_STATES):
            slept.add_metric((*self._labels, state), float(place == level))
        yield slept
        if gauges.blocks:
            told = {
                "block_size": str(gauges.block_tokens),
                "num_gpu_blocks": str(gauges.blocks),
                "enable_prefix_caching": str(gauges.prefix_cache),
            }
            cache = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The cache of keys and values: its blocks, and the tokens of each.",
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
                "Adapters of requests; the value is the time, which finds the latest labels.",
                labels=(*LABELS, *used),
            )
            lora.add_metric((*self._labels, *used.values()), time.time())
            yield lora

    def _counters(self, gauges: Gauges) -> Iterator[Metric]:
        rows = [
            ("vllm:prompt_tokens", "Tokens of prompts.", gauges.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of answers.", gauges.output_tokens),
            (
                "vllm:prefix_cache_queries",
                "Tokens of prompts that were looked up in the prefix cache.",
                gauges.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Those of them that were found.", gauges.prefix_hits),
            ("vllm:prompt_tokens_cached", "As prefix_cache_hits.", gauges.prefix_hits),
            ("vllm:num_preemptions", "Requests that lost their place.", gauges.preemptions),
            ("meshwright:engine_steps", "Steps of the engine.", gauges.steps),
            ("vllm:spec_decode_num_drafts", "Guesses ahead that were checked.", gauges.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Their tokens.", gauges.draft_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Those of them that were right.",
                gauges.accepted_tokens,
            ),
        ]
        for name, help_text, value in rows:
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric(self._labels, float(value))
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, and how.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in self.ends.items():
            ends.add_metric((*self._labels, reason), count)
        yield ends
        answers = CounterMetricFamily(
            "meshwright:http_requests",
            "Answers of the server.",
            labels=("method", "path", "status"),
        )
        for told, count in self.statuses.items():
            answers.add_metric(told, count)
        yield answers

    def _tallies(self) -> list[tuple[str, str, Tally]]:
        return [
            ("time_to_first_token_seconds", "Until the first token.", self.first_token),
            ("inter_token_latency_seconds", "Between pieces of an answer.", self.next_token),
            ("time_per_output_token_seconds", "As inter_token_latency.", self.next_token),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a request's tokens after the first.",
                self.mean_token,
            ),
            ("e2e_request_latency_seconds", "Whole requests.", self.whole),
            ("request_queue_time_seconds", "Waiting for a place in the engine.", self.queued),
            ("request_inference_time_seconds", "Having a place in the engine.", self.inference),
            ("request_prefill_time_seconds", "From a place to the first token.", self.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode),
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_length),
            ("request_generation_tokens", "Tokens of an answer.", self.answer_length),
            (
                "request_max_num_generation_tokens",
                "Tokens of a request's longest answer.",
                self.longest_answer,
            ),
            ("request_params_max_tokens", "Tokens that a request may get.", self.asked_length),
            ("request_params_n", "Answers that a request asks for.", self.choices),
        ]
