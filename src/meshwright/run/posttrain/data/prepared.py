"""`Prepared`: all examples of a set in memory, fitted to a length.

    words = load_words("path/of/model")
    chats = prepare(["chats.jsonl"], words, length=2048)
    print(chats.figures)

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
from meshwright.run.posttrain.data.answers import Train
from meshwright.run.posttrain.data.encoding import Example, encode_chat, encode_text, end_of
from meshwright.run.posttrain.data.figures import Figures
from meshwright.run.posttrain.data.forms import Chat, Form, Kind, form_of
from meshwright.run.posttrain.data.records import Record, read_records
from meshwright.run.serve.model.words import Words
from meshwright.run.train.data.corpus import Ints
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.data.selection import Split

TooLong = Literal["cut", "drop", "split", "refuse"]
"""What becomes of examples longer than a sequence: their end is cut off, they are left out, they go
on in another sequence, or the set is refused."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Examples as columns."""

    kind: Kind
    length: int
    """Positions of the sequences they were fitted to."""
    tokens: NDArray[np.int32]
    """Of all examples, end to end."""
    trained: NDArray[np.bool_]
    starts: Ints
    """First token of each example, and last the number of tokens."""
    firsts: Ints
    """First example of each unit, and last the number of examples."""
    liked: NDArray[np.bool_]
    """For each example: whether it is the chosen one, or was judged well; true for chats."""
    records: tuple[str, ...]
    """Where each unit comes from."""
    figures: Figures
    fingerprint: str
    padding: int
    """Token that fills sequences up."""

    @property
    def units(self) -> int:
        """How many there are."""
        return len(self.firsts) - 1

    def example(self, number: int) -> Example:
        """Return one example."""
        inside = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return Example(self.tokens[inside], self.trained[inside])


def prepare(
    sources: str | Path | Sequence[str | Path] | Iterable[Record],
    words: Words,
    *,
    length: int,
    train: Train = "answers",
    too_long: TooLong = "cut",
    split: Split = "train",
    validation: float = 0.0,
    values: Mapping[str, Any] | None = None,
) -> Prepared:
    """Read files, or records at hand, and turn them into tokens.

    Args:
        sources: Paths, or records.
        words: The model's tokenizer with its template, as serving reads them.
        length: Positions of a sequence.
        train: Which answers are trained.
        too_long: What becomes of examples longer than that.
        split: Those to train on, or those held out.
        validation: Share that is held out.
        values: Names that the template may ask for, such as `enable_thinking`.
    """
    taken = _Taken(length, too_long)
    for number, record in enumerate(_records(sources)):
        if not is_of(number, split, validation):
            continue
        form = form_of(record)
        taken.check_kind(form.kind, record.where, train)
        try:
            units = list(_units(form, words, train, values))
        except InputError as error:
            raise InputError(
                Problem(f"{record.where}: {one.where}", one.what, one.fix) for one in error.problems
            ) from error
        taken.add(form, units, record.where)
    return taken.done(end_of(words), words)


def gather(
    units: Iterable[tuple[str, Example]], *, length: int, too_long: TooLong, padding: int
) -> Prepared:
    """Take in examples that have tokens already, each with where it comes from."""
    taken = _Taken(length, too_long)
    for where, example in units:
        taken.check_kind("chats", where, "answers")
        taken.add(Form("chats", ()), [(example,)], where)
    return taken.done(padding)


def is_of(number: int, split: Split, validation: float) -> bool:
    """Tell whether a record is of a split, by its number; without a share held out, all are."""
    every = max(2, round(1 / validation)) if validation else 0
    return not every or (number % every == every - 1) == (split == "validation")


def _records(sources: str | Path | Sequence[str | Path] | Iterable[Record]) -> Iterator[Record]:
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    paths = [one for one in listed if isinstance(one, str | Path)]
    if paths:
        return read_records(paths)
    return (one for one in listed if isinstance(one, Record))


def _units(
    form: Form, words: Words, train: Train, values: Mapping[str, Any] | None
) -> Iterator[tuple[Example, ...]]:
    """Yield what a record becomes; of a chat, each answer may be a unit of its own."""
    found = [
        encode_chat(words, one, train, values)
        if isinstance(one, Chat)
        else [encode_text(words, one, train)]
        for one in form.members
    ]
    if len(found) == 1:
        yield from ((one,) for one in found[0])
    elif all(len(one) == 1 for one in found):
        yield tuple(one[0] for one in found)


class _Taken:
    """Examples as they are taken in, and what is counted of them."""

    def __init__(self, length: int, too_long: TooLong) -> None:
        self.length, self.too_long = length, too_long
        self.kind: Kind | None = None
        self.examples: list[Example] = []
        self.sizes: list[int] = []
        self.liked: list[bool] = []
        self.where: list[str] = []
        self.wanted = 0
        """Tokens of the longest unit of which nothing that is trained fits."""
        self.counts = dict.fromkeys(
            ("records", "cut", "cut_tokens", "dropped_long", "dropped_untrained", "alike",
             "open_ends", "parted", "longest"), 0
        )  # fmt: skip

    def check_kind(self, kind: Kind, where: str, train: Train) -> None:
        """Refuse sets of two kinds, and what pairs cannot do."""
        if self.kind not in (None, kind):
            what = f"is of another kind ({kind}) than what came before ({self.kind})"
            raise InputError([Problem(where, what, "prepare each kind on its own")])
        if kind == "pairs" and (train in ("each", "all") or self.too_long == "split"):
            what = (
                f"is a pair, for which train = {train} with too_long = {self.too_long} is nothing"
            )
            fix = "train answers or last, and cut, drop or refuse what is too long"
            raise InputError([Problem(where, what, fix)])
        self.kind = kind

    def add(self, form: Form, units: Sequence[tuple[Example, ...]], where: str) -> None:
        """Take a record in, or count why not."""
        self.counts["records"] += 1
        before = len(self.sizes)
        long = False
        for unit in units:
            self.counts["longest"] = max(self.counts["longest"], *(len(one.tokens) for one in unit))
            fitted = self._fitted(unit, where)
            long = long or fitted is None
            if fitted is None or not all(one.targets for one in fitted):
                if all(one.targets for one in unit):
                    self.wanted = max(self.wanted, sum(len(one.tokens) for one in unit))
                continue
            self.examples += fitted
            self.sizes.append(len(fitted))
            self.liked += [True, False] if form.kind == "pairs" else [form.liked]
            self.where.append(where)
            self.counts["alike"] += form.kind == "pairs" and _are_alike(*fitted)
            self.counts["open_ends"] += sum(one.open_ends for one in fitted)
            self.counts["parted"] += sum(one.parted for one in fitted)
        if len(self.sizes) == before:
            self.counts["dropped_long" if long else "dropped_untrained"] += 1

    def _fitted(self, unit: tuple[Example, ...], where: str) -> tuple[Example, ...] | None:
        """Return a unit that fits a sequence, or None where it is left out."""
        total = sum(len(one.tokens) for one in unit)
        if total <= self.length or self.too_long == "split":
            return unit
        if self.too_long == "refuse":
            what = f"has {total:,} tokens, a sequence {self.length:,}"
            fix = f"use a length of {total}, or cut, drop or split what is too long"
            raise InputError([Problem(where, what, fix)])
        if self.too_long == "drop":
            return None
        fitted = tuple(
            one._replace(tokens=one.tokens[:room], trained=one.trained[:room])
            for one, room in zip(unit, _rooms(unit, self.length), strict=True)
        )
        if all(one.targets for one in fitted):
            self.counts["cut"] += sum(
                len(one.tokens) < len(was.tokens) for one, was in zip(fitted, unit, strict=True)
            )
            self.counts["cut_tokens"] += total - sum(len(one.tokens) for one in fitted)
        return fitted

    def done(self, end: int, words: Words | None = None) -> Prepared:
        """Join everything; what fills up is the tokenizer's own token for it, or the end."""
        if not self.counts["records"]:
            fix = "give more records, a larger data.validation, or none"
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
        if self.counts["alike"] == len(self.sizes):
            what = f"both answers are the same in all {len(self.sizes):,} pairs"
            raise InputError([Problem("data", what, "give pairs whose answers differ")])
        lengths = [len(one.tokens) for one in self.examples]
        tokens = np.concatenate([one.tokens for one in self.examples])
        trained = np.concatenate([one.trained for one in self.examples])
        starts: Ints = np.concatenate([[0], np.cumsum(lengths)])
        trained[starts[:-1]] = False
        firsts: Ints = np.concatenate([[0], np.cumsum(self.sizes)])
        liked = np.array(self.liked, bool)
        figures = Figures(
            examples=len(lengths), tokens=len(tokens), targets=int(trained.sum()),
            length=self.length, **self.counts,
        )  # fmt: skip
        columns = (tokens, trained, starts, firsts, liked)
        name = fingerprint(self.kind, *(column.tobytes() for column in columns))
        pad = None if words is None else words.number(words.special.get("pad_token", ""))
        return Prepared(
            self.kind, self.length, tokens, trained, starts, firsts, liked, tuple(self.where),
            figures, name, end if pad is None else pad,
        )  # fmt: skip


def _are_alike(chosen: Example, rejected: Example) -> bool:
    """Tell whether a pair prefers nothing: both answers have the same tokens."""
    return bool(np.array_equal(chosen.tokens, rejected.tokens))


def _rooms(unit: tuple[Example, ...], length: int) -> list[int]:
    """Share a sequence: the shorter of two keeps up to half of it, the longer gets the rest."""
    if len(unit) == 1:
        return [length]
    chosen, rejected = (len(one.tokens) for one in unit)
    half = length // 2
    if min(chosen, rejected) >= half:
        return [length - half, half]
    return [chosen, length - chosen] if chosen < rejected else [length - rejected, rejected]
