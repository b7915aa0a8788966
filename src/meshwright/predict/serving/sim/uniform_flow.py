"""Requests of like length flowing through a replica: a quick stand-in for the full simulation.

All requests have one length of prompt, and lengths of output spread evenly between two ends, so
that a batch is told by a few sums. Steps without a change (nobody starts, nobody ends) are folded
into one by the closed form of `StepCost`. Requests are admitted in order, each with room for all
its tokens, so nothing is ever preempted.
"""

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from meshwright.predict.serving.cost.kv_memory import ServingMemory
from meshwright.predict.serving.cost.step_cost import StepCost

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, less their whole part, spread evenly however many are taken."""

MIN_ROUNDS = 2
"""Batches of a load that are followed at its beginning and end, whatever comes between."""


class UniformLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a replica."""

    prompt_tokens: float
    output_tokens: float
    """Mean of all requests."""
    requests: int
    concurrency: int | None = None
    """Requests at a time, each followed by the next; None sends all at once."""
    rate_per_s: float | None = None
    """Requests that arrive evenly per second."""
    output_half_width: float = 0.0
    """Half the width of the outputs' lengths, as a share of their mean."""
    cached_share: float = 0.0
    """Share of the prompts that is found in the cache."""


class FlowResult(NamedTuple):
    """How requests went."""

    total_s: float
    output_tok_s: float
    ttft_s: float
    """Mean time to the first token."""
    tpot_s: float
    """Mean time between later tokens of a request."""
    mean_decode_batch: float
    """Mean number of requests that decode in a step."""


class _Run:
    """The state of a replica between two steps."""

    def __init__(self, cost: StepCost, load: UniformLoad, requests: int, tokens: int) -> None:
        self.cost, self.load = cost, load
        self.most_requests, self.most_tokens = requests, tokens
        self.prompt = max(1, round(load.prompt_tokens * (1.0 - load.cached_share)))
        self.cached = load.prompt_tokens - self.prompt
        self.now = 0.0
        self.steps = 0
        self.decoding = 0
        self.context_sum = 0.0
        self.sent = 0
        self.waiting: deque[float] = deque()
        self.half_done = 0
        self.ending: list[tuple[int, float, int, int]] = []
        self.started = 0
        self.ended = 0
        self.ttft_sum = self.tpot_sum = self.outputs = 0.0
        self.decoded = self.decode_steps = 0

    def output_of(self, number: int) -> int:
        """Return the output's length of a request."""
        load = self.load
        if not load.output_half_width:
            return max(1, round(load.output_tokens))
        place = 2.0 * ((number * GOLDEN_RATIO) % 1.0) - 1.0
        return max(1, round(load.output_tokens * (1.0 + load.output_half_width * place)))

    def arrive(self) -> None:
        """Let requests come that are due."""
        load = self.load
        if self.sent >= load.requests:
            return
        if load.rate_per_s is not None:
            while self.sent < load.requests and self.sent / load.rate_per_s <= self.now:
                self.waiting.append(self.sent / load.rate_per_s)
                self.sent += 1
            return
        inside = self.sent - self.ended
        room = (load.concurrency or load.requests) - inside
        for _ in range(min(room, load.requests - self.sent)):
            self.waiting.append(self.now)
            self.sent += 1

    def next_arrival(self) -> float | None:
        """Return when the next request comes by itself."""
        if self.load.rate_per_s is None or self.sent >= self.load.requests:
            return None
        return self.sent / self.load.rate_per_s

    def prefill(self) -> None:
        """Run one step that computes prompts, with the decodes where the engine mixes them."""
        mixed = self.cost.replica.engine.enable_chunked_prefill
        free = self.most_requests - self.decoding
        wanted = min(len(self.waiting), free)
        room = self.most_tokens - (self.decoding if mixed else 0)
        tokens = max(1, min(room, wanted * self.prompt - self.half_done))
        done = (self.half_done + tokens) // self.prompt
        self.half_done = (self.half_done + tokens) % self.prompt
        pairs = tokens * (self.prompt / 2.0 + self.cached)
        decodes = self.decoding if mixed else 0
        self.now += self.cost.step_s(
            prefill_tokens=tokens, prefill_pairs=pairs, decodes=decodes,
            context_sum=self.context_sum if mixed else 0.0, sampled=decodes + done,
        )  # fmt: skip
        if mixed:
            self._decoded(1)
        for _ in range(done):
            self.ttft_sum += self.now - self.waiting.popleft()
        if self.load.output_half_width:
            for _ in range(done):
                self._started(1)
        elif done:
            self._started(done)

    def _started(self, many: int) -> None:
        """Let requests of one length go on from their first token."""
        length = self.output_of(self.started)
        self.started += many
        self.outputs += many * length
        if length == 1:
            self.ended += many
            return
        heappush(self.ending, (self.steps + length - 1, self.now, length, many))
        self.decoding += many
        self.context_sum += many * (self.load.prompt_tokens + 1)

    def _decoded(self, steps: int) -> None:
        self.steps += steps
        self.decoded += steps * self.decoding
        self.decode_steps += steps if self.decoding else 0
        self.context_sum += steps * self.decoding
        while self.ending and self.ending[0][0] <= self.steps:
            _, first, length, many = heappop(self.ending)
            self.tpot_sum += many * (self.now - first) / (length - 1)
            self.context_sum -= many * (self.load.prompt_tokens + length)
            self.decoding -= many
            self.ended += many

    def decode(self) -> None:
        """Run steps that only decode, up to the next end or arrival."""
        steps = self.ending[0][0] - self.steps
        arrival = self.next_arrival()
        if arrival is not None and self.decoding < self.most_requests:
            one = self.cost.decode_steps_s(self.decoding, self.context_sum, 1)
            steps = min(steps, max(1, int((arrival - self.now) / one) + 1))
        self.now += self.cost.decode_steps_s(self.decoding, self.context_sum, steps)
        self._decoded(steps)


def simulate_uniform_flow(
    cost: StepCost, memory: ServingMemory, load: UniformLoad,
    *, batch_requests: int | None = None, batch_tokens: int | None = None,
) -> FlowResult:  # fmt: skip
    """Return how requests go through a replica that admits them in order."""
    engine, dp = cost.replica.engine, cost.replica.layout.dp
    longest = load.prompt_tokens + load.output_tokens
    fitting = dp * memory.requests(longest)
    requests = max(1, min(batch_requests or engine.max_num_seqs * dp, fitting))
    tokens = max(batch_tokens or engine.max_num_batched_tokens * dp, requests + 1)
    at_once = load.concurrency is None and load.rate_per_s is None
    rounds = (load.requests - MIN_ROUNDS * requests) // requests
    if not at_once or load.output_half_width or rounds < 2:
        return _followed(cost, load, requests, tokens)
    # Batch after batch of equal requests repeats itself: one round more is worth all in between.
    few = load.requests - rounds * requests
    short = _followed(cost, _sized(load, few), requests, tokens)
    longer = _followed(cost, _sized(load, few + requests), requests, tokens)
    round_s = longer.total_s - short.total_s
    total = short.total_s + rounds * round_s
    return FlowResult(
        total, load.requests * load.output_tokens / total, short.ttft_s + rounds * round_s / 2,
        longer.tpot_s, longer.mean_decode_batch,
    )  # fmt: skip


def _sized(load: UniformLoad, requests: int) -> UniformLoad:
    return msgspec.structs.replace(load, requests=requests)


def _followed(cost: StepCost, load: UniformLoad, requests: int, tokens: int) -> FlowResult:
    """Follow every request of a load."""
    run = _Run(cost, load, requests, tokens)
    while run.ended < load.requests:
        run.arrive()
        if run.waiting and run.decoding < requests:
            run.prefill()
        elif run.decoding:
            run.decode()
        else:
            run.now = max(run.now, run.next_arrival() or run.now)
    total, engine, tpot = run.now, cost.replica.engine, run.tpot_sum / load.requests
    late = engine.frontend_s + engine.frontend_steps * tpot
    return FlowResult(
        total, run.outputs / total, run.ttft_sum / load.requests + late, tpot,
        run.decoded / max(1, run.decode_steps),
    )  # fmt: skip
