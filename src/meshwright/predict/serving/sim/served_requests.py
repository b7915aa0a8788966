"""`ServedRequests`: how simulated requests fared, as columns, and the gaps between their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.predict.serving.sim.simulated_engine import Floats, StepRuns

Ints = npt.NDArray[np.int64]


class TokenGap(NamedTuple):
    """A gap between two tokens of a request that made room for others, or moved."""

    request: int
    start_s: float
    """When the token before it came."""
    resumed_s: float
    """When the request was back among those who decode."""
    has_token: bool
    """Whether that brought a token; otherwise the next step does."""
    engine: int


class ServedRequests(NamedTuple):
    """Columns of requests, in their order, and what each engine did."""

    arrival_s: Floats
    first_s: Floats
    """First tokens at the client; not a number where the request was refused."""
    end_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    """Tokens of prompts that were found in the prefix cache."""
    preemptions: Ints
    """How often a request made room for others."""
    engine: Ints
    """Which engine decoded it; -1 where it was refused."""
    engines: tuple[StepRuns, ...]
    """Those that compute prompts first, where they are apart."""
    prefill_engines: int
    """How many of the engines only compute prompts."""
    kv_blocks: tuple[int, ...]
    """Blocks of each engine's KV cache."""
    gaps: tuple[TokenGap, ...]
    """Gaps that are not between two steps."""
    delay_s: Floats
    """Part of each request's latency that is spent before and behind the engine."""

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Which requests were not refused."""
        return self.engine >= 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token, as the engines see it."""
        if not self.completed.any():
            return 0.0
        return float(np.nanmax(self.end_s - self.delay_s) - self.arrival_s.min())


class TokenGaps(NamedTuple):
    """Gaps between tokens, and how many there are of each."""

    seconds: Floats
    counts: Floats


def list_token_gaps(served: ServedRequests) -> TokenGaps:
    """Return the gaps between tokens of all requests."""
    parts = [_gaps_of(served, number) for number in range(len(served.engines))]
    found = [part for group in parts for part in group]
    if not found:
        return TokenGaps(np.empty(0), np.empty(0))
    return TokenGaps(
        np.concatenate([seconds for seconds, _ in found]),
        np.concatenate([count for _, count in found]),
    )


def count_slow_gaps(served: ServedRequests, longest_s: float) -> Floats:
    """Count for each request the gaps between its tokens that are longer than that."""
    found = np.zeros(len(served.arrival_s))
    for number, did in enumerate(served.engines):
        mine = np.flatnonzero(served.engine == number)
        if not len(mine) or not len(did.end_s):
            continue
        rows, first_s, rest_s = _decodes(did)
        slow = np.zeros(len(did.end_s) + 1)
        slow[rows + 1] = (first_s > longest_s) + (did.steps[rows] - 1) * (rest_s > longest_s)
        total = np.cumsum(slow)
        began, ended = (
            np.searchsorted(did.end_s, column[mine] - served.delay_s[mine] + 1e-9, side="right")
            for column in (served.first_s, served.end_s)
        )
        found[mine] = total[ended] - total[began]
        # The second token follows the first, not the last step that decoded for others.
        second = np.searchsorted(rows, began)
        some = np.flatnonzero((second < len(rows)) & (served.output_tokens[mine] > 1))
        second = second[some]
        step_s = did.start_s[rows[second]] + rest_s[second] - served.first_s[mine[some]]
        own = step_s + served.delay_s[mine[some]] > longest_s
        found[mine[some]] += own.astype(float) - (first_s[second] > longest_s)
    for gap in served.gaps:
        if gap.has_token:
            found[gap.request] += gap.resumed_s - gap.start_s > longest_s
    return found


def _decodes(did: StepRuns) -> tuple[Ints, Floats, Floats]:
    """Return the stretches that decode, the gap before the first token of each, and the others.

    The first token follows the one of the last stretch that decoded: steps with prompts alone may
    lie between.
    """
    rows = np.flatnonzero(did.decodes > 0)
    step_s = (did.end_s[rows] - did.start_s[rows]) / did.steps[rows]
    first_s = step_s.copy()
    # Without a break from one to the next, the step itself is all there is between two tokens.
    apart = np.flatnonzero(np.diff(rows) > 1) + 1
    first_s[apart] += did.start_s[rows[apart]] - did.end_s[rows[apart - 1]]
    return rows, first_s, step_s


def _gaps_of(served: ServedRequests, number: int) -> list[tuple[Floats, Floats]]:
    did = served.engines[number]
    rows, first_s, step_s = _decodes(did)
    moved = [gap for gap in served.gaps if gap.engine == number]
    if not len(rows):
        return []
    first_token_s = did.start_s[rows] + step_s
    going_on = did.decodes[rows].copy()
    found = [(step_s, (did.steps[rows] - 1) * going_on)]
    # Who joined since has waited for a shorter time than the others.
    joins = np.flatnonzero(did.concurrent_sequences > 0)
    following = np.searchsorted(rows, joins, side="right")
    joins, following = joins[following < len(rows)], following[following < len(rows)]
    fresh = did.concurrent_sequences[joins].copy()
    if moved:
        back = np.array([gap.resumed_s for gap in moved])
        start = np.array([gap.start_s for gap in moved])
        came = np.array([gap.has_token for gap in moved])
        found.append(((back - start)[came], np.ones(int(came.sum()))))
        # The others wait for the next step, from the token that they had before.
        places = np.searchsorted(did.end_s[joins], back[~came] - 1e-12)
        there = places < len(joins)
        np.subtract.at(fresh, places[there], 1.0)
        waits = first_token_s[following[places[there]]] - start[~came][there]
        found.append((waits, np.ones(len(waits))))
        np.subtract.at(going_on, following[places[there]], 1.0)
    fresh = np.maximum(fresh, 0.0)
    found.append((first_token_s[following] - did.end_s[joins], fresh))
    np.subtract.at(going_on, following, fresh)
    found.append((first_s, np.maximum(going_on, 0.0)))
    return found


def to_column(numbers: Sequence[float]) -> Floats:
    """Return times as a column; what never came is not a number."""
    found = np.array(numbers, dtype=np.float64)
    found[found < 0] = np.nan
    return found
