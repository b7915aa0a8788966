"""`DataSettings`: which text a run trains on. How sequences are cut from it is the workload's."""

import msgspec

from meshwright.errors import Problem
from meshwright.spec.bounds import Bounds, real, whole

MOST_WEIGHT = 1e9
MOST_AHEAD = 1024


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One corpus of a blend."""

    path: str
    """A folder that `mw data tokenize` wrote, the prefix of Megatron's .bin and .idx files, or
    text to tokenise first (a file, a folder, or `standard`)."""
    weight: float | None = None
    """Share of the sequences that come from it, relative to the other sources' weights; None goes
    by size, so that all sources end their epochs together."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.named(path=self.path)
        if self.weight is not None:
            bounds.problems += real("weight", self.weight, 1e-9, MOST_WEIGHT)
        bounds.require()


class DataSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the tokens come from."""

    sources: tuple[Source | str, ...]
    """The corpora; a path alone is a source without a weight."""
    validation: float = 0.0
    """Share of each source's documents that is held out: every n-th one, by number."""
    validation_sources: tuple[Source | str, ...] = ()
    """Corpora of held-out text, in place of a share."""
    tokenizer: str = ""
    """For sources that are text: `bytes`, or a tokenizer's JSON file or folder."""
    field: str = "text"
    """For sources that are JSON lines or Parquet: the field that holds the text."""
    cache: str = ""
    """Folder for tokenised text and packing plans; left out, plans lie beside the corpora and text
    must be tokenised by hand."""
    shuffle: bool = True
    """Shuffle documents and sequences, anew in every epoch."""
    ahead: int = 4
    """Steps made ready in the background."""
    workers: int = 1
    """Threads that make them."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.readable(sources=self.sources, validation_sources=self.validation_sources)
        if bounds.sound("sources") and not self.sources:
            bounds.add("sources", "names no corpus", 'give one: sources = ["path"]')
        bounds.problems += real("validation", self.validation, 0.0, 0.5)
        bounds.problems += whole("ahead", self.ahead, most=MOST_AHEAD)
        bounds.problems += whole("workers", self.workers, most=MOST_AHEAD)
        bounds.named(field=self.field)
        if bounds.sound("sources", "validation_sources"):
            bounds.problems += _problems("sources", self.sources)
            bounds.problems += _problems("validation_sources", self.validation_sources)
        if bounds.sound("validation") and self.validation and self.validation_sources:
            what = "is given beside validation_sources"
            bounds.add("validation", what, "give one of the two")
        bounds.require()


def as_sources(given: tuple[Source | str, ...]) -> tuple[Source, ...]:
    """Return sources in full where some were given as paths alone."""
    return tuple(one if isinstance(one, Source) else Source(path=one) for one in given)


def _problems(name: str, given: tuple[Source | str, ...]) -> list[Problem]:
    empty = [place for place, source in enumerate(given) if not source]
    if empty:
        return [Problem(f"{name}[{place}]", "is no path", "name a corpus") for place in empty]
    sources = as_sources(given)
    without = [place for place, source in enumerate(sources) if source.weight is None]
    if not without or len(without) == len(sources):
        return []
    where = f"{name}[{without[0]}].weight"
    return [Problem(where, "is left out where others have one", "weigh every source, or none")]
