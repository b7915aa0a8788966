"""`TrainingWorkload`: tokens to train on, and their sequences. It knows no model or cluster."""

import math
from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_number
from meshwright.spec.workload.lengths import FixedLength, Lengths
from meshwright.spec.workload.lora import LoRASpec

Packing = Literal["none", "concat", "pack"]

MAX_IMBALANCE = 10_000.0
"""No rank gets more than all tokens, and no model has more experts to spread."""


class TrainingWorkload(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="training",
    tag_field="kind",
):
    """A training run: how many tokens, in sequences of which length, how many to a step."""

    tokens: int
    """Tokens to train on in all; padding does not count."""
    sequence_length: int
    """Positions of one sequence as the model sees it."""
    global_batch: int
    """Sequences per optimizer step over all replicas."""
    lengths: Lengths | None = None
    """Lengths of the documents; None means that each fills one sequence."""
    packing: Packing = "pack"
    """How documents fill a sequence: `none` puts one in each, cut or padded to fit; `concat` lays
    them end to end and attends across them; `pack` does so with a mask that keeps them apart."""
    adapter: LoRASpec | None = None
    """What is trained beside frozen weights (LoRA); None trains every weight."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean; the others wait for it. 1 is
    forced balance, as most benchmarks run."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            tokens=self.tokens,
            sequence_length=self.sequence_length,
            global_batch=self.global_batch,
        )
        bounds.one_of("packing", self.packing, get_args(Packing))
        bounds.mark_unreadable(lengths=self.lengths, adapter=self.adapter)
        bounds.problems += check_number(
            "expert_imbalance", self.expert_imbalance, 1.0, MAX_IMBALANCE
        )
        if bounds.is_valid("lengths") and self.lengths is not None and self.lengths.mean() < 1:
            what = f"average {self.lengths.mean():.3g} tokens"
            bounds.add("lengths", what, "make documents hold one token or more")
        bounds.raise_problems()

    @property
    def tokens_per_step(self) -> int:
        """Positions that the model computes in one step, padding included."""
        return self.global_batch * self.sequence_length

    @property
    def padding_share(self) -> float:
        """Expected share of the computed positions that hold no token."""
        return max(0.0, 1.0 - self._kept() / self.sequence_length)

    @property
    def truncated_share(self) -> float:
        """Expected share of the documents' tokens that do not fit and are thrown away."""
        if self.lengths is None or self.packing != "none":
            return 0.0
        return max(0.0, 1.0 - self._kept() / self.lengths.mean())

    @property
    def num_steps(self) -> int:
        """Optimizer steps until every token was trained on."""
        kept = self._kept()
        if kept == self.sequence_length:  # in whole numbers, exact for any count of tokens
            return -(-self.tokens // self.tokens_per_step)
        return max(1, math.ceil(self.tokens / (self.global_batch * kept)))

    def _kept(self) -> float:
        """Expected tokens, padding left out, in one sequence."""
        if self.lengths is None or self.packing != "none":
            return self.sequence_length
        return self.lengths.clipped_mean(self.sequence_length)

    @property
    def squared_length(self) -> float:
        """Expected sum, over the spans of one sequence that attend within themselves, of length².

        Attention cost grows with it (half of it for a causal mask). It is the squared sequence
        length unless masks keep packed documents apart; padding attends like any other position.
        """
        whole_sequence = float(self.sequence_length**2)
        if self.lengths is None or self.packing != "pack":
            return whole_sequence
        # The bounds hold by themselves, but for rounding where documents are a millionth as long.
        squares = _packed_squares(self.lengths, self.sequence_length)
        return min(whole_sequence, max(float(self.sequence_length), squares))


def _packed_squares(lengths: Lengths, sequence: int) -> float:
    """Expected sum of squared span lengths in a sequence cut out of an endless row of documents.

    The squares of a document's spans count the pairs of its positions that share a sequence. Two
    positions at distance d share one with probability max(0, 1 - d/S), as the cuts fall anywhere;
    summing over the pairs of a document of length L gives L² - (L³ - L)/3S up to L = S, and
    L·S - (S² - 1)/3 above. A sequence holds S/E[L] documents' worth of tokens.
    """
    # Documents of one length are cut only at multiples of the step they share with the sequence,
    # which makes that step the unit of the sums.
    step = math.gcd(lengths.tokens, sequence) if isinstance(lengths, FixedLength) else 1
    share, first, second, third = (lengths.raw_moment(order, sequence) for order in range(4))
    short = second - (third - step**2 * first) / (3 * sequence)
    mean = lengths.mean()
    long = (mean - first) * sequence - (1 - share) * (sequence**2 - step**2) / 3
    return (short + long) * sequence / mean
