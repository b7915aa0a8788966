"""`PreparedDataset`: all examples of a set in memory, fitted to a length.

    words = load_tokenizer("path/of/model")
    chats = prepare_dataset(["chats.jsonl"], words, length=2048)
    print(chats.stats)

A unit is what must stay together: one example, or a chosen answer with the rejected one. Held out
is every n-th record by its number, for any seed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.completion_spans import TrainOn
from meshwright.run.posttrain.data.dataset_stats import DatasetStats
from meshwright.run.posttrain.data.encoding import (
    TokenizedExample,
    encode_chat,
    encode_text,
    find_end_token,
)
from meshwright.run.posttrain.data.record_format import (
    ChatExample,
    DatasetKind,
    ParsedRecord,
    parse_record,
)
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.document_split import SplitName
from meshwright.run.train.data.fingerprint import compute_fingerprint

LengthPolicy = Literal["truncate", "drop", "split", "error"]
"""What becomes of examples longer than a sequence: their end is cut off, they are left out, they go
on in another sequence, or the set is refused."""


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """Examples as columns."""

    kind: DatasetKind
    sequence_length: int
    """Positions of the sequences they were fitted to."""
    tokens: NDArray[np.int32]
    """Of all examples, end to end."""
    loss_mask: NDArray[np.bool_]
    example_starts: Ints
    """First token of each example, and last the number of tokens."""
    unit_starts: Ints
    """First example of each unit, and last the number of examples."""
    is_preferred: NDArray[np.bool_]
    """For each example: whether it is the chosen one, or was judged well; true for chats."""
    sources: tuple[str, ...]
    """Where each unit comes from."""
    stats: DatasetStats
    fingerprint: str
    pad_token_id: int
    """Token that fills sequences up."""

    @property
    def num_units(self) -> int:
        """How many there are."""
        return len(self.unit_starts) - 1

    def get_example(self, number: int) -> TokenizedExample:
        """Return one example."""
        inside = slice(int(self.example_starts[number]), int(self.example_starts[number + 1]))
        return TokenizedExample(self.tokens[inside], self.loss_mask[inside])


def prepare_dataset(
    sources: str | Path | Sequence[str | Path] | Iterable[DataRecord],
    tokenizer: Tokenizer,
    *,
    length: int,
    train_on: TrainOn = "assistant",
    length_policy: LengthPolicy = "truncate",
    split: SplitName = "train",
    validation: float = 0.0,
    values: Mapping[str, Any] | None = None,
) -> PreparedDataset:
    """Read files, or records at hand, and turn them into tokens.

    Args:
        sources: Paths, or records.
        tokenizer: The model's tokenizer with its template, as serving reads them.
        length: Positions of a sequence.
        train_on: Which answers are trained.
        length_policy: What becomes of examples longer than that.
        split: Those to train on, or those held out.
        validation: Share that is held out.
        values: Names that the template may ask for, such as `enable_thinking`.
    """
    taken = _DatasetBuilder(length, length_policy)
    for number, record in enumerate(_records(sources)):
        if not is_in_split(number, split, validation):
            continue
        form = parse_record(record)
        taken.check_kind(form.kind, record.source, train_on)
        try:
            units = list(_units(form, tokenizer, train_on, values))
        except InputError as error:
            raise InputError(
                Problem(f"{record.source}: {one.where}", one.what, one.fix)
                for one in error.problems
            ) from error
        taken.add(form, units, record.source)
    return taken.done(find_end_token(tokenizer), tokenizer)


def collect_examples(
    units: Iterable[tuple[str, TokenizedExample]],
    *,
    length: int,
    length_policy: LengthPolicy,
    padding: int,
) -> PreparedDataset:
    """Take in examples that have tokens already, each with where it comes from."""
    taken = _DatasetBuilder(length, length_policy)
    for where, example in units:
        taken.check_kind("chats", where, "assistant")
        taken.add(ParsedRecord("chats", ()), [(example,)], where)
    return taken.done(padding)


def is_in_split(number: int, split: SplitName, validation: float) -> bool:
    """Tell whether a record is of a split, by its number; without a share held out, all are."""
    every = max(2, round(1 / validation)) if validation else 0
    return not every or (number % every == every - 1) == (split == "validation")


def _records(
    sources: str | Path | Sequence[str | Path] | Iterable[DataRecord],
) -> Iterator[DataRecord]:
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    paths = [one for one in listed if isinstance(one, str | Path)]
    if paths:
        return read_records(paths)
    return (one for one in listed if isinstance(one, DataRecord))


def _units(
    form: ParsedRecord, tokenizer: Tokenizer, train_on: TrainOn, values: Mapping[str, Any] | None
) -> Iterator[tuple[TokenizedExample, ...]]:
    """Yield what a record becomes; of a chat, each answer may be a unit of its own."""
    found = [
        encode_chat(tokenizer, one, train_on, values)
        if isinstance(one, ChatExample)
        else [encode_text(tokenizer, one, train_on)]
        for one in form.examples
    ]
    if len(found) == 1:
        yield from ((one,) for one in found[0])
    elif all(len(one) == 1 for one in found):
        yield tuple(one[0] for one in found)


class _DatasetBuilder:
    """Examples as they are taken in, and what is counted of them."""

    def __init__(self, length: int, length_policy: LengthPolicy) -> None:
        self.length, self.length_policy = length, length_policy
        self.kind: DatasetKind | None = None
        self.examples: list[TokenizedExample] = []
        self.sizes: list[int] = []
        self.liked: list[bool] = []
        self.where: list[str] = []
        self.wanted = 0
        """Tokens of the longest unit of which nothing that is trained fits."""
        self.counts = dict.fromkeys(
            ("records", "truncated", "truncated_tokens", "dropped_long", "dropped_without_targets",
             "identical_pairs", "unterminated_completions", "split_at_boundary",
             "max_example_tokens"), 0
        )  # fmt: skip

    def check_kind(self, kind: DatasetKind, where: str, train_on: TrainOn) -> None:
        """Refuse sets of two kinds, and what pairs cannot do."""
        if self.kind not in (None, kind):
            what = f"is of another kind ({kind}) than what came before ({self.kind})"
            raise InputError([Problem(where, what, "prepare each kind on its own")])
        if kind == "pairs" and (train_on in ("each", "all") or self.length_policy == "split"):
            what = (
                f"is a pair, for which train_on = {train_on} with length_policy = "
                f"{self.length_policy} is nothing"
            )
            fix = "use train_on = assistant or last, and length_policy = truncate, drop or error"
            raise InputError([Problem(where, what, fix)])
        self.kind = kind

    def add(
        self, form: ParsedRecord, units: Sequence[tuple[TokenizedExample, ...]], where: str
    ) -> None:
        """Take a record in, or count why not."""
        self.counts["records"] += 1
        before = len(self.sizes)
        long = False
        for unit in units:
            self.counts["max_example_tokens"] = max(
                self.counts["max_example_tokens"], *(len(one.token_ids) for one in unit)
            )
            fitted = self._fitted(unit, where)
            long = long or fitted is None
            if fitted is None or not all(one.num_targets for one in fitted):
                if all(one.num_targets for one in unit):
                    self.wanted = max(self.wanted, sum(len(one.token_ids) for one in unit))
                continue
            self.examples += fitted
            self.sizes.append(len(fitted))
            self.liked += [True, False] if form.kind == "pairs" else [form.is_preferred]
            self.where.append(where)
            self.counts["identical_pairs"] += form.kind == "pairs" and _are_alike(*fitted)
            self.counts["unterminated_completions"] += sum(
                one.unterminated_completions for one in fitted
            )
            self.counts["split_at_boundary"] += sum(one.is_split_at_boundary for one in fitted)
        if len(self.sizes) == before:
            self.counts["dropped_long" if long else "dropped_without_targets"] += 1

    def _fitted(
        self, unit: tuple[TokenizedExample, ...], where: str
    ) -> tuple[TokenizedExample, ...] | None:
        """Return a unit that fits a sequence, or None where it is left out."""
        total = sum(len(one.token_ids) for one in unit)
        if total <= self.length or self.length_policy == "split":
            return unit
        if self.length_policy == "error":
            what = f"has {total:,} tokens, a sequence {self.length:,}"
            fix = f"use a length of {total}, or length_policy = truncate, drop or split"
            raise InputError([Problem(where, what, fix)])
        if self.length_policy == "drop":
            return None
        fitted = tuple(
            one._replace(token_ids=one.token_ids[:room], loss_mask=one.loss_mask[:room])
            for one, room in zip(unit, _rooms(unit, self.length), strict=True)
        )
        if all(one.num_targets for one in fitted):
            self.counts["truncated"] += sum(
                len(one.token_ids) < len(was.token_ids)
                for one, was in zip(fitted, unit, strict=True)
            )
            self.counts["truncated_tokens"] += total - sum(len(one.token_ids) for one in fitted)
        return fitted

    def done(self, end: int, tokenizer: Tokenizer | None = None) -> PreparedDataset:
        """Join everything; what fills up is the tokenizer's own token for it, or the end."""
        if not self.counts["records"]:
            fix = "give more records, a larger data.validation_fraction, or none"
            what = "there are too few records to train on some and hold out others"
            raise InputError([Problem("data", what, fix)])
        if self.kind is None or not self.examples:
            what = f"nothing is left to train of {self.counts['records']:,} records"
            counted = ", ".join(f"{n} {name}" for name, n in self.counts.items() if n)
            fix = f"look at what was left out: {counted}"
            if self.wanted:
                together = " (the two answers of a pair share one)" if self.kind == "pairs" else ""
                fix = (
                    f"use longer sequences than {self.length:,}{together}; {self.wanted:,} tokens "
                    "hold all: workload.sequence_length"
                )
            raise InputError([Problem("data", what, fix)])
        if self.counts["identical_pairs"] == len(self.sizes):
            what = f"both answers are the same in all {len(self.sizes):,} pairs"
            raise InputError([Problem("data", what, "give pairs whose answers differ")])
        lengths = [len(one.token_ids) for one in self.examples]
        tokens = np.concatenate([one.token_ids for one in self.examples])
        trained = np.concatenate([one.loss_mask for one in self.examples])
        starts: Ints = np.concatenate([[0], np.cumsum(lengths)])
        trained[starts[:-1]] = False
        firsts: Ints = np.concatenate([[0], np.cumsum(self.sizes)])
        liked = np.array(self.liked, bool)
        figures = DatasetStats(
            examples=len(lengths), tokens=len(tokens), targets=int(trained.sum()),
            sequence_length=self.length, **self.counts,
        )  # fmt: skip
        columns = (tokens, trained, starts, firsts, liked)
        name = compute_fingerprint(self.kind, *(column.tobytes() for column in columns))
        pad = (
            None
            if tokenizer is None
            else tokenizer.token_to_id(tokenizer.special_tokens.get("pad_token", ""))
        )
        return PreparedDataset(
            self.kind, self.length, tokens, trained, starts, firsts, liked, tuple(self.where),
            figures, name, end if pad is None else pad,
        )  # fmt: skip


def _are_alike(chosen: TokenizedExample, rejected: TokenizedExample) -> bool:
    """Tell whether a pair prefers nothing: both answers have the same tokens."""
    return bool(np.array_equal(chosen.token_ids, rejected.token_ids))


def _rooms(unit: tuple[TokenizedExample, ...], length: int) -> list[int]:
    """Share a sequence: the shorter of two keeps up to half of it, the longer gets the rest."""
    if len(unit) == 1:
        return [length]
    chosen, rejected = (len(one.token_ids) for one in unit)
    half = length // 2
    if min(chosen, rejected) >= half:
        return [length - half, half]
    return [chosen, length - chosen] if chosen < rejected else [length - rejected, rejected]
