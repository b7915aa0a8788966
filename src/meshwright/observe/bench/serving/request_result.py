"""`RequestResult`: what became of one request, token by token, as whoever asked saw it."""

from itertools import accumulate

import msgspec


class RequestResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request and its answer; times count from the start of the run."""

    index: int
    """Which request of the run."""
    scheduled_s: float
    """When it should have been sent."""
    sent_s: float
    """When it was; the distance is the load generator's own lateness."""
    end_s: float
    """When its answer, or its failure, was complete."""
    requested_prompt_tokens: int
    """Tokens that the prompt was made to have."""
    requested_output_tokens: int
    """Tokens that the answer was to have."""
    prompt_tokens: int | None = None
    """Tokens of the prompt as the server counted them."""
    output_tokens: int = 0
    """Tokens of the answer, by the server's count where it gives one."""
    cached_tokens: int = 0
    """Tokens of the prompt that the server had computed before, where it says so."""
    chunk_gaps_us: tuple[int, ...] = ()
    """Microseconds until the first piece of the answer, then from each piece to the next."""
    chunk_tokens: tuple[int, ...] = ()
    """Tokens of each piece; empty where every piece has one."""
    finish_reason: str = ""
    """Why the server ended the answer."""
    error: str = ""
    """Why there is no whole answer, in a word or two that others share; empty where there is."""
    error_detail: str = ""
    """What was said about it."""
    in_metrics: bool = True
    """Whether figures are made from it: requests of a ramp are not."""
    answer_hash: str = ""
    """A hash of the answer."""
    output: tuple[int, ...] | str | None = None
    """The answer, where it was to be kept: its tokens, or its text from servers without them."""

    @property
    def ttft_s(self) -> float:
        """Time to the first piece."""
        return self.chunk_gaps_us[0] / 1e6

    @property
    def gaps_s(self) -> list[float]:
        """Waits for each piece after the first."""
        return [gap / 1e6 for gap in self.chunk_gaps_us[1:]]

    @property
    def e2e_s(self) -> float:
        """Time to the last piece."""
        return sum(self.chunk_gaps_us) / 1e6

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no second."""
        if self.output_tokens < 2:
            return None
        return sum(self.chunk_gaps_us[1:]) / 1e6 / (self.output_tokens - 1)

    @property
    def chunk_arrivals(self) -> list[tuple[float, int]]:
        """When each piece came, since the start of the run, and how many tokens it had."""
        counts = self.chunk_tokens or (1,) * len(self.chunk_gaps_us)
        times = accumulate(self.chunk_gaps_us)
        return [(self.sent_s + at / 1e6, n) for at, n in zip(times, counts, strict=True)]
