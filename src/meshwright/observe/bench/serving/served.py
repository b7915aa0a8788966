"""`Served`: what became of one request, token by token, as whoever asked saw it."""

from itertools import accumulate

import msgspec


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request and its answer; times count from the start of the run."""

    index: int
    """Which request of the run."""
    due_s: float
    """When it should have been sent."""
    sent_s: float
    """When it was; the distance is the load generator's own lateness."""
    end_s: float
    """When its answer, or its failure, was complete."""
    asked_prompt: int
    """Tokens that the prompt was made to have."""
    asked_output: int
    """Tokens that the answer was to have."""
    prompt_tokens: int | None = None
    """Tokens of the prompt as the server counted them."""
    output_tokens: int = 0
    """Tokens of the answer, by the server's count where it gives one."""
    cached_tokens: int = 0
    """Tokens of the prompt that the server had computed before, where it says so."""
    pieces_us: tuple[int, ...] = ()
    """Microseconds until the first piece of the answer, then from each piece to the next."""
    piece_tokens: tuple[int, ...] = ()
    """Tokens of each piece; empty where every piece has one."""
    finish: str = ""
    """Why the server ended the answer."""
    fault: str = ""
    """Why there is no whole answer, in a word or two that others share; empty where there is."""
    detail: str = ""
    """What was said about it."""
    counted: bool = True
    """Whether figures are made from it: requests of a ramp are not."""
    digest: str = ""
    """A hash of the answer."""
    answer: tuple[int, ...] | str | None = None
    """The answer, where it was to be kept: its tokens, or its text from servers without them."""

    @property
    def ttft_s(self) -> float:
        """Time to the first piece."""
        return self.pieces_us[0] / 1e6

    @property
    def gaps_s(self) -> list[float]:
        """Waits for each piece after the first."""
        return [gap / 1e6 for gap in self.pieces_us[1:]]

    @property
    def e2e_s(self) -> float:
        """Time to the last piece."""
        return sum(self.pieces_us) / 1e6

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no second."""
        if self.output_tokens < 2:
            return None
        return sum(self.pieces_us[1:]) / 1e6 / (self.output_tokens - 1)

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """When each piece came, since the start of the run, and how many tokens it had."""
        counts = self.piece_tokens or (1,) * len(self.pieces_us)
        times = accumulate(self.pieces_us)
        return [(self.sent_s + at / 1e6, n) for at, n in zip(times, counts, strict=True)]
