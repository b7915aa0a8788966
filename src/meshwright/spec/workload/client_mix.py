"""Streams made of many clients, each with habits of its own that change over the day.

The shape of the models is ServeGen's (Xiang et al., arXiv 2505.09999): for each client, how often
and how burstily it asks in every ten minutes, and histograms of its lengths in every six hours.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, takewhile
from random import Random
from typing import Literal

import msgspec

from meshwright.spec.workload.lengths import EmpiricalLength
from meshwright.spec.workload.requests import WorkloadRequest

ArrivalFamily = Literal["Gamma", "Weibull"]


class ClientRateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How often a client asks during one stretch of time."""

    start_s: float
    """When the stretch begins."""
    length_s: float
    """How long it lasts."""
    rate_per_s: float
    """Mean requests per second; zero where the client is silent."""
    family: ArrivalFamily = "Gamma"
    """Distribution of the gaps between requests."""
    shape: float = 1.0
    """Shape of that distribution; its scale follows from the rate."""

    def times_s(self, rng: Random) -> list[float]:
        """Draw the arrival times within the stretch: gaps of the family, fitted to its length."""
        count = round(self.rate_per_s * self.length_s)
        if self.family == "Gamma":
            gaps = [rng.gammavariate(self.shape, 1.0) for _ in range(count + 1)]
        else:
            gaps = [rng.weibullvariate(1.0, self.shape) for _ in range(count + 1)]
        total = math.fsum(gaps) or 1.0
        scale = self.length_s / total
        return [self.start_s + time * scale for time in accumulate(gaps[:-1])]


class PromptItem(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of item in a prompt, such as images: how many, and tokens of each."""

    count: EmpiricalLength
    """Items in one prompt."""
    tokens: EmpiricalLength
    """Tokens of one item."""


class ClientLengths(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client's requests are from some time on."""

    start_s: float
    """When it begins to hold."""
    prompt: EmpiricalLength
    """Tokens of the prompt's text."""
    output: EmpiricalLength
    """Tokens of the answer, reasoning included."""
    prompt_items: tuple[PromptItem, ...] = ()
    """Images, audio and video in the prompt."""

    def sample(self, rng: Random, count: int) -> list[tuple[int, int]]:
        """Draw pairs of prompt and answer tokens."""
        prompts = self.prompt.sample(rng, count)
        for part in self.prompt_items:
            items = part.count.sample(rng, count)
            tokens = iter(part.tokens.sample(rng, sum(items)))
            for place, number in enumerate(items):
                prompts[place] += sum(next(tokens) for _ in range(number))
        return list(zip(prompts, self.output.sample(rng, count), strict=True))


class WorkloadClient(msgspec.Struct, frozen=True, kw_only=True):
    """One client: when it asks, and how long its requests are."""

    name: str
    """What the client is called."""
    windows: tuple[ClientRateWindow, ...]
    """Its rate over time, in order."""
    lengths_over_time: tuple[ClientLengths, ...]
    """Its lengths over time, in order."""

    def generate(self, seed: int, start_s: float = 0.0) -> Iterator[WorkloadRequest]:
        """Yield the client's requests from `start_s` on, which becomes time zero."""
        starts = [habit.start_s for habit in self.lengths_over_time]
        for window in self.windows:
            if window.start_s + window.length_s <= start_s or not window.rate_per_s:
                continue
            # Each window draws for itself, so requests do not depend on where one begins to look.
            rng = Random(f"{seed}/{self.name}/{window.start_s}")
            habit = self.lengths_over_time[max(0, bisect_right(starts, window.start_s) - 1)]
            times = window.times_s(rng)
            lengths = habit.sample(rng, len(times))
            for time, (prompt, output) in zip(times, lengths, strict=True):
                if time >= start_s:
                    yield WorkloadRequest(
                        arrival_s=time - start_s,
                        prompt_tokens=max(1, prompt),
                        output_tokens=output,
                    )


class ClientMix(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that many clients share."""

    clients: tuple[WorkloadClient, ...]
    """The clients."""

    @property
    def duration_s(self) -> float:
        """Seconds until the last client's last window ends."""
        return max(c.windows[-1].start_s + c.windows[-1].length_s for c in self.clients)

    def rate_per_s(self, start_s: float = 0.0) -> float:
        """Return the rate of all clients together at one moment."""
        return sum(
            window.rate_per_s
            for client in self.clients
            for window in client.windows
            if window.start_s <= start_s < window.start_s + window.length_s
        )

    def generate(
        self, seed: int, start_s: float = 0.0, duration_s: float = math.inf
    ) -> Iterator[WorkloadRequest]:
        """Yield all clients' requests in order of arrival; `start_s` becomes time zero."""
        streams = (client.generate(seed, start_s) for client in self.clients)
        merged = heapq.merge(*streams, key=lambda request: request.arrival_s)
        return takewhile(lambda request: request.arrival_s < duration_s, merged)
