"""`StepCost`: seconds of one step of a serving engine, from a few sums over its requests.

    step = host + tokens(prompt tokens + decodes) + head(sampled) + Σ key · contexts + pair · pairs

`tokens` and `head` are straight lines between points worked out once for a replica; the rest is
linear. So a step costs about a microsecond to price, and steps that only decode have a closed form:
with contexts that grow by one token each, `k` steps take `k · fixed + key · Σ contexts`.

Products and small kernels come from the operator tables of the device (`predict/cost`), messages
from `predict/network` or from one-shot kernels over fast links, whichever is quicker; a
`ServingEngine` says what the software adds. All times are of the slowest GPU of the replica. Units
are seconds, bytes and tokens.
"""

from bisect import bisect_right
from functools import lru_cache
from math import inf

from msgspec.structs import replace

from meshwright.predict.cost.device_costs import DeviceCosts, build_device_costs, scale_costs
from meshwright.predict.network import build_placement, build_strided_placement, collective_s
from meshwright.predict.network.placement import Placement
from meshwright.predict.serving.cost.attention_cost import build_attention_cost
from meshwright.predict.serving.cost.layer_cost import count_layers, lm_head_s, token_cost
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica

TOKEN_GRID = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    16384,
    32768,
)
"""Numbers of tokens that are priced in full."""
MAX_CACHED_POINTS = 1 << 14
"""Points of a line whose values are kept."""
FIRST_PDL_ARCH = "sm_90"
"""Where kernels begin before the one before them has ended."""
LAUNCHES_PER_LAYER = 11
"""Kernels of a layer in a step with prompts: products, norms, attention of both kinds, the rest."""


class LinearInterpolation:
    """A function of a whole number, straight between points and beyond the last two."""

    def __init__(self, points: tuple[int, ...], values: list[float]) -> None:
        self.points = points
        self.values = values
        self.slopes = [
            (values[i + 1] - values[i]) / (points[i + 1] - points[i])
            for i in range(len(points) - 1)
        ]
        self.last = len(self.slopes) - 1

    def __call__(self, at: float) -> float:
        """Return the value, 0 at 0."""
        if at <= 0:
            return 0.0
        i = bisect_right(self.points, at) - 1
        i = 0 if i < 0 else self.last if i > self.last else i
        return self.values[i] + self.slopes[i] * (at - self.points[i])


class StepCost:
    """What steps of one replica take."""

    def __init__(self, replica: Replica) -> None:
        layout, engine, model = replica.layout, replica.engine, replica.model
        costs = build_device_costs(replica.cluster.gpu, replica.calibration)
        slower = costs.sustained_slowdown**engine.power_limit_exponent
        device = scale_costs(
            costs, products=slower, low=slower, read_share=engine.weight_bandwidth_share
        )
        formats = replica.quantization
        if engine.per_channel_scales:
            formats = replace(formats, per_channel_scales=True)
        self.replica = replica
        self.attention_cost = build_attention_cost(device, model, layout, formats, engine)
        self._pp = layout.pp
        tokens = LinearInterpolation(
            TOKEN_GRID, [_tokens_s(replica, formats, device, n) for n in TOKEN_GRID]
        )
        head = LinearInterpolation(
            TOKEN_GRID, [lm_head_s(device, model, layout, formats, n) for n in TOKEN_GRID]
        )
        # Looked up a million times in a simulation, at few points.
        self._tokens, self._head = (
            lru_cache(MAX_CACHED_POINTS)(tokens),
            lru_cache(MAX_CACHED_POINTS)(head),
        )
        self._lines: dict[int, tuple[float, float, float]] = {}
        self._passing_s = (layout.pp - 1) * _hop_s(replica)
        casts = token_cost(device, model, layout, formats, 1).low_precision_gemms
        self._launches_s = engine.launch_s * (
            model.layers + engine.cast_kernels * casts / LAUNCHES_PER_LAYER
        )
        self._prefill_s = engine.prefill_s * model.layers
        # Each attention group has a host process of its own.
        self._host_s, self._request_s = engine.step_s, engine.request_s / layout.dp
        # On a processor no graphs launch: the host starts every kernel, and runs it.
        self._alone = replica.cluster.gpu.kind == "cpu"
        self._hidden = replica.async_scheduling
        self._is_one_line = not (self.attention_cost.sliding_window_layers or self._hidden)

    def step_s(
        self,
        *,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
        decodes: int = 0,
        context_sum: float = 0.0,
        sampled: int | None = None,
        captured: int = 0,
    ) -> float:
        """Return the seconds of a step.

        `prefill_pairs` sums the keys that each prompt token sees, `context_sum` the keys of all
        decoding requests. `sampled` rows pass the output head; by default the decoding ones. A step
        with prompts that is `captured` for so many tokens is padded to them and launched at once.
        With pipeline stages it is the time until every request of the batch has its token, while
        as many parts of the batch are on their way as there are stages.
        """
        rows = decodes if sampled is None else sampled
        about = self.attention_cost
        parts = self._pp
        tokens = captured or prefill_tokens + decodes
        seconds = self._passing_s + self._tokens(tokens / parts) + self._head(rows / parts)
        read_s = about.request_s * decodes + about.key_s * context_sum
        for part in about.sliding_window_layers:
            read_s += part.key_s * min(context_sum, part.window_tokens * decodes)
        # Stages have parts of the batch in turn, but one request is in no two of them at a time.
        seconds += read_s if parts == 1 else read_s / max(1, min(parts, decodes))
        host = self._host_s + self._request_s * (rows if rows > decodes else decodes)
        if (prefill_tokens and not captured) or self._alone:
            host += self._launches_s
        if prefill_tokens:
            seen_s = about.pair_s * prefill_pairs + about.token_s * prefill_tokens
            for part in about.sliding_window_layers:
                seen_s += part.pair_s * min(prefill_pairs, part.window_tokens * prefill_tokens)
            seconds += self._prefill_s + seen_s / (1 if parts == 1 else min(parts, prefill_tokens))
        return max(seconds, host) if self._hidden else seconds + host

    def fit_decode_cost(self, batch: int, mean_context: float) -> tuple[float, float, float]:
        """Return `fixed` and `slope` of steps that decode: `fixed + slope · context_sum` seconds.

        The third is the mean context up to which that holds: the next window, or where the device
        takes as long as a host that works meanwhile.
        """
        known = self._lines.get(batch)
        if known is None:
            known = self._lines[batch] = self._line(batch)
        if self._is_one_line:
            return known
        (fixed, slope, until), parts = known, min(self._pp, batch)
        for part in self.attention_cost.sliding_window_layers:
            key_s = part.key_s / parts
            if mean_context > part.window_tokens:
                fixed += key_s * part.window_tokens * batch
            else:
                slope += key_s
                until = min(until, part.window_tokens)
        if not self._hidden:
            return fixed, slope, until
        host = self._host_of(batch)
        if fixed + slope * mean_context * batch >= host:
            return fixed, slope, until
        if slope:
            until = min(until, (host - fixed) / (slope * batch))
        return host, 0.0, until

    def _line(self, batch: int) -> tuple[float, float, float]:
        """Return the same without windows, and without a host that works meanwhile."""
        parts, about = min(self._pp, batch), self.attention_cost
        fixed = self._passing_s + self._tokens(batch / self._pp) + self._head(batch / self._pp)
        fixed += about.request_s * batch / parts
        return fixed + (0.0 if self._hidden else self._host_of(batch)), about.key_s / parts, inf

    def _host_of(self, batch: int) -> float:
        return self._host_s + self._request_s * batch + (self._launches_s if self._alone else 0.0)

    def decode_steps_s(self, batch: int, context_sum: float, steps: int) -> float:
        """Return the seconds of `steps` steps in which `batch` requests decode, no other comes."""
        if batch <= 0:
            return 0.0
        seconds, mean = 0.0, context_sum / batch
        while steps > 0:
            fixed, slope, until = self.fit_decode_cost(batch, mean)
            count = count_steps_within(steps, mean, until)
            seconds += count * (fixed + slope * (mean + (count - 1) / 2) * batch)
            steps, mean = steps - count, mean + count
        return seconds


def count_steps_within(steps: int, mean_context: float, until: float) -> int:
    """Return how many of some steps begin with a mean context of `until` at most; one at least."""
    left = until - mean_context
    return steps if left >= steps - 1 else max(1, int(left) + 1)


@lru_cache(maxsize=4096)
def build_step_cost(replica: Replica) -> StepCost:
    """Return the costs of a replica's steps, worked out once."""
    return StepCost(replica)


def _tokens_s(replica: Replica, formats: Quantization, device: DeviceCosts, tokens: int) -> float:
    """Return what a step's tokens take in all layers, whatever their contexts are."""
    model, layout, engine = replica.model, replica.layout, replica.engine
    work = token_cost(device, model, layout, formats, tokens)
    often = count_layers(model, layout)
    kernel_s = device.launch.kernel_s
    found = engine.gemm_slowdown * (work.gemms_s + work.experts_s) + work.small_kernels_s
    found += (
        often.layers * engine.small_kernels * kernel_s + often.attention_layers * engine.attention_s
    )
    found += engine.cast_kernels * work.cast_s
    if (
        tokens <= engine.max_prefetch_rows
        and layout.tp == 1
        and device.gpu.arch.startswith(FIRST_PDL_ARCH)
    ):
        found -= engine.gemm_slowdown * work.bf16_gemms * device.get_gemm_rate("bf16").launch_s
    found += often.moe_layers * engine.moe_layer_s
    if often.all_reduces:
        found += often.all_reduces * all_reduce_s(replica, work.all_reduce_bytes)
    if often.expert_dispatches:
        found += often.expert_dispatches * _exchange_s(replica, work.dispatch_bytes)
    return found


def all_reduce_s(replica: Replica, nbytes: float) -> float:
    """Return the seconds of one all-reduce over the tensor group, by the quickest way."""
    place = build_strided_placement(replica.cluster, 0, replica.layout.tp)
    library = collective_s(place, "all_reduce", nbytes)
    if (
        place.domains > 1
        or place.intra_link != "scale-up"
        or replica.cluster.scale_up.kind == "pcie"
    ):
        return library
    size = replica.layout.tp
    wire = replica.engine.link_bandwidth_share * replica.cluster.scale_up.gpu_bytes_per_s
    latency = replica.engine.all_reduce_latency_s
    once = latency + nbytes * (size - 1) / wire
    twice = 1.5 * latency + 2 * nbytes * (size - 1) / size / wire
    return min(library, once, twice)


def _exchange_s(replica: Replica, nbytes: float) -> float:
    """Return the seconds in which a layer's tokens go to their experts and come back."""
    place = _group(replica, replica.layout.tp * replica.layout.dp)
    wire = replica.engine.link_bandwidth_share * replica.cluster.scale_up.gpu_bytes_per_s
    if place.domains > 1:
        cards = place.nic_bytes_per_s * place.nics / place.ranks_per_domain
        wire = min(wire, replica.engine.link_bandwidth_share * cards)
    return 3 * replica.engine.all_reduce_latency_s + nbytes / wire


def _hop_s(replica: Replica) -> float:
    """Return the seconds of passing a step's tokens to the next stage."""
    if replica.layout.pp == 1:
        return 0.0
    return 2 * replica.engine.all_reduce_latency_s


def _group(replica: Replica, size: int) -> Placement:
    return build_placement(replica.cluster, range(size))
