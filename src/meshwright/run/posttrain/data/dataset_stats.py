"""What became of records on their way to sequences, in numbers and in words."""

import msgspec


class DatasetStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of prepared data, and of its sequences once there are some."""

    records: int
    """Records that were read, without those of the other split."""
    examples: int
    """Chats and answers that are left; of pairs both."""
    tokens: int
    targets: int
    """Tokens that are trained."""
    max_example_tokens: int
    """Tokens of the longest example before it was cut."""
    truncated: int = 0
    """Examples that lost their end to the length."""
    truncated_tokens: int = 0
    dropped_long: int = 0
    """Records left out because they are too long."""
    dropped_without_targets: int = 0
    """Records left out because nothing in them is trained, or nothing that fits."""
    identical_pairs: int = 0
    """Pairs whose answers are the same, so that nothing is learnt from them."""
    unterminated_completions: int = 0
    """Answers without a token that ends them."""
    split_at_boundary: int = 0
    """Examples with a token that would have reached across the edge of an answer."""
    sequence_length: int = 0
    """Positions of a sequence."""
    sequences: int = 0
    """Sequences of an epoch."""
    batch_size: int = 0
    """Sequences of a step."""
    filled_tokens: int = 0
    """Their positions that hold a token."""
    split_examples: int = 0
    """Examples that lie in more than one sequence."""

    @property
    def trained_fraction(self) -> float:
        """Share of the tokens that are trained."""
        return self.targets / self.tokens if self.tokens else 0.0

    @property
    def packed_fraction(self) -> float:
        """Share of the positions of all sequences that hold a token."""
        return (
            self.filled_tokens / (self.sequences * self.sequence_length) if self.sequences else 0.0
        )

    def summary_lines(self) -> list[str]:
        """Say it in a few lines, leaving out what did not happen."""
        lines = [
            f"{self.records:,} records, {self.examples:,} examples, {self.tokens:,} tokens, "
            f"{self.targets:,} trained ({self.trained_fraction:.1%})"
        ]
        if self.sequences:
            each = self.examples / self.sequences
            lines.append(
                f"{self.sequences:,} sequences of {self.sequence_length:,}, "
                f"{self.packed_fraction:.1%} filled, "
                f"{each:.1f} examples in each"
            )
            if self.batch_size > self.sequences:
                times = self.batch_size / self.sequences
                lines.append(
                    f"every step of {self.batch_size:,} sequences holds each of them {times:.3g} "
                    f"times; "
                    f"workload.global_batch={self.sequences} would hold them once"
                )
        happened = [
            (
                self.truncated,
                f"{self.truncated:,} examples cut, {self.truncated_tokens:,} tokens of them lost",
            ),
            (self.dropped_long, f"{self.dropped_long:,} records left out: too long"),
            (
                self.dropped_without_targets,
                f"{self.dropped_without_targets:,} records left out: nothing of them is trained, "
                "or nothing that fits",
            ),
            (
                self.identical_pairs,
                f"pairs of twice the same answer, which teach nothing: {self.identical_pairs:,}",
            ),
            (
                self.split_examples,
                f"{self.split_examples:,} examples are stored in several sequences",
            ),
            (
                self.unterminated_completions,
                f"{self.unterminated_completions:,} answers have no token that ends them",
            ),
            (
                self.split_at_boundary,
                f"{self.split_at_boundary:,} examples encoded in parts, as they are served",
            ),
        ]
        lines += [line for count, line in happened if count]
        lines.append(f"longest example: {self.max_example_tokens:,} tokens")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.summary_lines())
