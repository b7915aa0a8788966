"""What became of records on their way to sequences, in numbers and in words."""

import msgspec


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of prepared data, and of its sequences once there are some."""

    records: int
    """Records that were read, without those of the other split."""
    examples: int
    """Chats and answers that are left; of pairs both."""
    tokens: int
    targets: int
    """Tokens that are trained."""
    longest: int
    """Tokens of the longest example before it was cut."""
    cut: int = 0
    """Examples that lost their end to the length."""
    cut_tokens: int = 0
    dropped_long: int = 0
    """Records left out because they are too long."""
    dropped_untrained: int = 0
    """Records left out because nothing in them is trained, or nothing that fits."""
    alike: int = 0
    """Pairs whose answers are the same, so that nothing is learnt from them."""
    open_ends: int = 0
    """Answers without a token that ends them."""
    parted: int = 0
    """Examples with a token that would have reached across the edge of an answer."""
    length: int = 0
    """Positions of a sequence."""
    sequences: int = 0
    """Sequences of an epoch."""
    batch: int = 0
    """Sequences of a step."""
    filled: int = 0
    """Their positions that hold a token."""
    split: int = 0
    """Examples that lie in more than one sequence."""

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are trained."""
        return self.targets / self.tokens if self.tokens else 0.0

    @property
    def packed_share(self) -> float:
        """Share of the positions of all sequences that hold a token."""
        return self.filled / (self.sequences * self.length) if self.sequences else 0.0

    def lines(self) -> list[str]:
        """Say it in a few lines, leaving out what did not happen."""
        lines = [
            f"{self.records:,} records, {self.examples:,} examples, {self.tokens:,} tokens, "
            f"{self.targets:,} trained ({self.trained_share:.1%})"
        ]
        if self.sequences:
            each = self.examples / self.sequences
            lines.append(
                f"{self.sequences:,} sequences of {self.length:,}, {self.packed_share:.1%} filled, "
                f"{each:.1f} examples in each"
            )
            if self.batch > self.sequences:
                times = self.batch / self.sequences
                lines.append(
                    f"every step of {self.batch:,} sequences holds each of them {times:.3g} times; "
                    f"workload.global_batch={self.sequences} would hold them once"
                )
        happened = [
            (self.cut, f"{self.cut:,} examples cut, {self.cut_tokens:,} tokens of them lost"),
            (self.dropped_long, f"{self.dropped_long:,} records left out: too long"),
            (
                self.dropped_untrained,
                f"{self.dropped_untrained:,} records left out: nothing of them is trained, "
                "or nothing that fits",
            ),
            (self.alike, f"pairs of twice the same answer, which teach nothing: {self.alike:,}"),
            (self.split, f"{self.split:,} examples lie in several sequences"),
            (self.open_ends, f"{self.open_ends:,} answers have no token that ends them"),
            (self.parted, f"{self.parted:,} examples encoded in parts, as they are served"),
        ]
        lines += [line for count, line in happened if count]
        lines.append(f"longest example: {self.longest:,} tokens")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())
