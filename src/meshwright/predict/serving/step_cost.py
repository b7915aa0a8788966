"""`StepCost`: seconds of one step of a serving engine, from a few sums over its requests.

    step = host + tokens(prompt tokens + decodes) + head(sampled) + Σ key · contexts + pair · pairs

`tokens` and `head` are straight lines between points worked out once for a replica; the rest is
linear. So a step costs about a microsecond to price, and steps that only decode have a closed form:
with contexts that grow by one token each, `k` steps take `k · fixed + key · Σ contexts`.

Products and small kernels come from the operator tables of the device (`predict/cost`), messages
from `predict/network` or from one-shot kernels over fast links, whichever is quicker; an `Engine`
says what the software adds. All times are of the slowest GPU of the replica. Units are seconds,
bytes and tokens.
"""

from bisect import bisect_right
from functools import lru_cache
from math import inf

from msgspec.structs import replace

from meshwright.predict.cost.device import DeviceCosts, costs_for, slowed
from meshwright.predict.network import collective_s, placement, strided
from meshwright.predict.network.placement import Placement
from meshwright.predict.serving.contexts import contexts
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.layer_work import counts, head_s, tokens_work
from meshwright.predict.serving.replica import Replica

GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
        6144, 8192, 16384, 32768)  # fmt: skip
"""Numbers of tokens that are priced in full."""
KEPT = 1 << 14
"""Points of a line whose values are kept."""
STREAMS = "sm_90"
"""Where kernels begin before the one before them has ended."""
LAUNCHES = 11
"""Kernels of a layer in a step with prompts: products, norms, attention of both kinds, the rest."""


class Line:
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
        costs = costs_for(replica.cluster.gpu, replica.calibration)
        slower = costs.sustained_slowdown**engine.heat
        device = slowed(costs, products=slower, low=slower, read_share=engine.weight_share)
        formats = replica.formats
        if engine.by_row:
            formats = replace(formats, by_row=True)
        self.replica = replica
        self.contexts = contexts(device, model, layout, formats, engine)
        self._pp = layout.pp
        tokens = Line(GRID, [_tokens_s(replica, formats, device, n) for n in GRID])
        head = Line(GRID, [head_s(device, model, layout, formats, n) for n in GRID])
        # Looked up a million times in a simulation, at few points.
        self._tokens, self._head = lru_cache(KEPT)(tokens), lru_cache(KEPT)(head)
        self._lines: dict[int, tuple[float, float, float]] = {}
        self._passing_s = (layout.pp - 1) * _hop_s(replica)
        casts = tokens_work(device, model, layout, formats, 1).casts
        self._launches_s = engine.launch_s * (model.layers + engine.casts * casts / LAUNCHES)
        self._prefill_s = engine.prefill_s * model.layers
        # Each attention group has a host process of its own.
        self._host_s, self._request_s = engine.step_s, engine.request_s / layout.dp
        # On a processor no graphs launch: the host starts every kernel, and runs it.
        self._alone = replica.cluster.gpu.kind == "cpu"
        self._hidden = replica.works_ahead
        self._is_one_line = not (self.contexts.windowed or self._hidden)

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
        about = self.contexts
        parts = self._pp
        tokens = captured or prefill_tokens + decodes
        seconds = self._passing_s + self._tokens(tokens / parts) + self._head(rows / parts)
        read_s = about.request_s * decodes + about.key_s * context_sum
        for part in about.windowed:
            read_s += part.key_s * min(context_sum, part.window * decodes)
        # Stages have parts of the batch in turn, but one request is in no two of them at a time.
        seconds += read_s if parts == 1 else read_s / max(1, min(parts, decodes))
        host = self._host_s + self._request_s * (rows if rows > decodes else decodes)
        if (prefill_tokens and not captured) or self._alone:
            host += self._launches_s
        if prefill_tokens:
            seen_s = about.pair_s * prefill_pairs + about.token_s * prefill_tokens
            for part in about.windowed:
                seen_s += part.pair_s * min(prefill_pairs, part.window * prefill_tokens)
            seconds += self._prefill_s + seen_s / (1 if parts == 1 else min(parts, prefill_tokens))
        return max(seconds, host) if self._hidden else seconds + host

    def decode_line(self, batch: int, mean_context: float) -> tuple[float, float, float]:
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
        for part in self.contexts.windowed:
            key_s = part.key_s / parts
            if mean_context > part.window:
                fixed += key_s * part.window * batch
            else:
                slope += key_s
                until = min(until, part.window)
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
        parts, about = min(self._pp, batch), self.contexts
        fixed = self._passing_s + self._tokens(batch / self._pp) + self._head(batch / self._pp)
        fixed += about.request_s * batch / parts
        return fixed + (0.0 if self._hidden else self._host_of(batch)), about.key_s / parts, inf

    def _host_of(self, batch: int) -> float:
        return self._host_s + self._request_s * batch + (self._launches_s if self._alone else 0.0)

    def decodes_s(self, batch: int, context_sum: float, steps: int) -> float:
        """Return the seconds of `steps` steps in which `batch` requests decode, no other comes."""
        if batch <= 0:
            return 0.0
        seconds, mean = 0.0, context_sum / batch
        while steps > 0:
            fixed, slope, until = self.decode_line(batch, mean)
            count = steps_within(steps, mean, until)
            seconds += count * (fixed + slope * (mean + (count - 1) / 2) * batch)
            steps, mean = steps - count, mean + count
        return seconds


def steps_within(steps: int, mean_context: float, until: float) -> int:
    """Return how many of some steps begin with a mean context of `until` at most; one at least."""
    left = until - mean_context
    return steps if left >= steps - 1 else max(1, int(left) + 1)


@lru_cache(maxsize=4096)
def step_cost(replica: Replica) -> StepCost:
    """Return the costs of a replica's steps, worked out once."""
    return StepCost(replica)


def _tokens_s(replica: Replica, formats: Formats, device: DeviceCosts, tokens: int) -> float:
    """Return what a step's tokens take in all layers, whatever their contexts are."""
    model, layout, engine = replica.model, replica.layout, replica.engine
    work = tokens_work(device, model, layout, formats, tokens)
    often = counts(model, layout)
    kernel_s = device.launch.kernel_s
    found = engine.gap * (work.products_s + work.experts_s) + work.small_s
    found += often.layers * engine.small_kernels * kernel_s + often.attentions * engine.attention_s
    found += engine.casts * work.cast_s
    if tokens <= engine.streamed_rows and layout.tp == 1 and device.gpu.arch.startswith(STREAMS):
        found -= engine.gap * work.wide * device.product("bf16").launch_s
    found += often.sparse * engine.expert_s
    if often.reduces:
        found += often.reduces * reduce_s(replica, work.reduce_bytes)
    if often.exchanges:
        found += often.exchanges * _exchange_s(replica, work.exchange_bytes)
    return found


def reduce_s(replica: Replica, nbytes: float) -> float:
    """Return the seconds of one all-reduce over the tensor group, by the quickest way."""
    place = strided(replica.cluster, 0, replica.layout.tp)
    library = collective_s(place, "all_reduce", nbytes)
    if place.units > 1 or place.inside != "scale-up" or replica.cluster.scale_up.kind == "pcie":
        return library
    size = replica.layout.tp
    wire = replica.engine.link_share * replica.cluster.scale_up.gpu_bytes_per_s
    latency = replica.engine.reduce_s
    once = latency + nbytes * (size - 1) / wire
    twice = 1.5 * latency + 2 * nbytes * (size - 1) / size / wire
    return min(library, once, twice)


def _exchange_s(replica: Replica, nbytes: float) -> float:
    """Return the seconds in which a layer's tokens go to their experts and come back."""
    place = _group(replica, replica.layout.tp * replica.layout.dp)
    wire = replica.engine.link_share * replica.cluster.scale_up.gpu_bytes_per_s
    if place.units > 1:
        cards = place.card_bytes_per_s * place.cards / place.per_unit
        wire = min(wire, replica.engine.link_share * cards)
    return 3 * replica.engine.reduce_s + nbytes / wire


def _hop_s(replica: Replica) -> float:
    """Return the seconds of passing a step's tokens to the next stage."""
    if replica.layout.pp == 1:
        return 0.0
    return 2 * replica.engine.reduce_s


def _group(replica: Replica, size: int) -> Placement:
    return placement(replica.cluster, range(size))
