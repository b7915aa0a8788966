"""`ServingWorkload`: a stream of requests to serve, described or drawn. It knows no server.

The same seed always draws the same requests, and each part (arrivals, prompts, answers, prefixes)
draws from a generator of its own: changing one part leaves the others as they were.
"""

from collections.abc import Iterator
from itertools import accumulate, islice, repeat, takewhile
from random import Random

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.workload.arrivals import Arrivals, FixedConcurrency, RecordedArrivals
from meshwright.spec.workload.lengths import Lengths

# Drawing many lengths at once costs half of drawing them one by one.
_BATCH = 1024

BLOCK_TOKENS = 512
"""Tokens of a prefix block where nothing else is said, as in the Mooncake traces."""


class WorkloadRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request: when it arrives, how much it reads and writes, and what its prompt shares."""

    arrival_s: float
    """Seconds since the start of the stream."""
    prompt_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """Tokens of the answer."""
    prefix_blocks: tuple[int, ...] = ()
    """Ids of the leading blocks of the prompt: two prompts that start with the same ids share
    these tokens. What follows is unlike any other prompt."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens of one such block; the last one of a prompt may be partly filled."""


class PrefixSharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts share their beginnings: system prompts, templates, documents asked about."""

    groups: int
    """Different shared prefixes."""
    tokens: Lengths
    """Lengths of these prefixes; a prompt shorter than its prefix holds a part of it."""
    share: float = 1.0
    """Share of the requests that start with one of the prefixes."""
    skew: float = 0.0
    """Popularity: the n-th prefix is drawn in proportion to 1 / n ** skew; 0 draws all alike."""
    block_tokens: int = 16
    """Tokens of a block, the unit in which prefixes are shared."""

    def __post_init__(self) -> None:
        raise_problems(
            check_integer("groups", self.groups, most=10**7),
            check_number("share", self.share, 0, 1),
            check_number("skew", self.skew, 0, 10),
            check_integer("block_tokens", self.block_tokens),
        )


class ServingWorkload(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="requests",
    tag_field="kind",
):
    """A stream of requests: how they arrive, how long they are, and what their prompts share."""

    arrival: Arrivals
    """The arrival process."""
    prompt: Lengths
    """Tokens of the prompts, shared prefix included."""
    output: Lengths
    """Tokens of the answers, independent of the prompts."""
    prefix: PrefixSharing | None = None
    """Prefix sharing; None means that no two prompts start alike."""

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second; None where it depends on the server."""
        return self.arrival.rate_per_s

    def generate(
        self, seed: int, count: int | None = None, duration_s: float | None = None
    ) -> Iterator[WorkloadRequest]:
        """Yield requests in order of arrival until `count` or `duration_s`, what comes first."""
        self._check_end(count, duration_s)
        times = self.arrival.times_s(_generator(seed, "arrival"))
        if duration_s is not None:
            times = takewhile(lambda time: time < duration_s, times)
        prompts = _draws(self.prompt, _generator(seed, "prompt"))
        outputs = _draws(self.output, _generator(seed, "output"))
        shared = _prefixes(self.prefix, _generator(seed, "prefix"))
        block = self.prefix.block_tokens if self.prefix else BLOCK_TOKENS
        rows = zip(times, prompts, outputs, shared, strict=False)
        return (
            WorkloadRequest(
                arrival_s=time,
                prompt_tokens=max(1, prompt),
                output_tokens=output,
                # Only whole blocks can be shared.
                prefix_blocks=tuple(blocks[: prompt // block]),
                block_tokens=block,
            )
            for time, prompt, output, blocks in islice(rows, count)
        )

    def _check_end(self, count: int | None, duration_s: float | None) -> None:
        problems = []
        if count is not None:
            problems += check_integer("count", count, least=0)
        if duration_s is not None:
            problems += check_number("duration_s", duration_s, 0, 1e12)
        if count is None and isinstance(self.arrival, FixedConcurrency):
            what = "requests that wait for each other have no arrival times to stop at"
            problems.append(Problem("count", what, "give a count"))
        elif (
            count is None and duration_s is None and not isinstance(self.arrival, RecordedArrivals)
        ):
            problems.append(Problem("count", "the stream has no end", "give a count or a duration"))
        if problems:
            raise InputError(problems)


def _generator(seed: int, part: str) -> Random:
    # Text seeds are hashed with SHA-512, so parts and neighbouring seeds are unrelated.
    return Random(f"{seed}/{part}")


def _draws(lengths: Lengths, rng: Random) -> Iterator[int]:
    while True:
        yield from lengths.sample(rng, _BATCH)


def _prefixes(prefix: PrefixSharing | None, rng: Random) -> Iterator[range]:
    """Yield the ids of the blocks that each prompt would share, were it long enough."""
    if prefix is None:
        yield from repeat(range(0))
        return
    blocks = [tokens // prefix.block_tokens for tokens in prefix.tokens.sample(rng, prefix.groups)]
    ends = list(accumulate(blocks))
    weights = list(accumulate(number**-prefix.skew for number in range(1, prefix.groups + 1)))
    numbers = range(prefix.groups)
    while True:
        group = rng.choices(numbers, cum_weights=weights)[0]
        shares = rng.random() < prefix.share
        yield range(ends[group] - blocks[group], ends[group]) if shares else range(0)
