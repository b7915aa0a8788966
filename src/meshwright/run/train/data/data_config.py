"""`DataConfig`: which text a run trains on. How sequences are cut from it is the workload's."""

import msgspec

from meshwright.errors import Problem
from meshwright.spec.field_checks import FieldChecker, check_integer, check_number

MAX_WEIGHT = 1e9
MAX_PREFETCH_STEPS = 1024


class DataSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One corpus of a blend."""

    path: str
    """A folder that `mw data tokenize` wrote, the prefix of Megatron's .bin and .idx files, or
    text to tokenize first (a file, a folder, or `builtin`)."""
    weight: float | None = None
    """Share of the sequences that come from it, relative to the other sources' weights; None goes
    by size, so that all sources end their epochs together."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(path=self.path)
        if self.weight is not None:
            bounds.problems += check_number("weight", self.weight, 1e-9, MAX_WEIGHT)
        bounds.raise_problems()


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the tokens come from."""

    sources: tuple[DataSource | str, ...]
    """The corpora; a path alone is a source without a weight."""
    validation_fraction: float = 0.0
    """Share of each source's documents that is held out: every n-th one, by number."""
    validation_sources: tuple[DataSource | str, ...] = ()
    """Corpora of held-out text, in place of a share."""
    tokenizer: str = ""
    """For sources that are text: `bytes`, or a tokenizer's JSON file or folder."""
    text_field: str = "text"
    """For sources that are JSON lines or Parquet: the field that holds the text."""
    cache_dir: str = ""
    """Folder for tokenized text and packing plans; left out, plans lie beside the corpora and text
    must be tokenized by hand."""
    shuffle: bool = True
    """Shuffle documents and sequences, anew in every epoch."""
    prefetch_steps: int = 4
    """Steps made ready in the background."""
    num_workers: int = 1
    """Threads that make them."""
    verify_checksums: bool = True
    """Read all files once, before or beside training, and stop where bytes have changed."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.mark_unreadable(sources=self.sources, validation_sources=self.validation_sources)
        if bounds.is_valid("sources") and not self.sources:
            bounds.add("sources", "names no corpus", 'give one: sources = ["path"]')
        bounds.problems += check_number("validation_fraction", self.validation_fraction, 0.0, 0.5)
        bounds.problems += check_integer(
            "prefetch_steps", self.prefetch_steps, most=MAX_PREFETCH_STEPS
        )
        bounds.problems += check_integer("num_workers", self.num_workers, most=MAX_PREFETCH_STEPS)
        bounds.not_empty(text_field=self.text_field)
        if bounds.is_valid("sources", "validation_sources"):
            bounds.problems += _problems("sources", self.sources)
            bounds.problems += _problems("validation_sources", self.validation_sources)
        if (
            bounds.is_valid("validation_fraction")
            and self.validation_fraction
            and self.validation_sources
        ):
            what = "is given beside validation_sources"
            bounds.add("validation_fraction", what, "give one of the two")
        bounds.raise_problems()


def normalize_sources(given: tuple[DataSource | str, ...]) -> tuple[DataSource, ...]:
    """Return sources in full where some were given as paths alone."""
    return tuple(one if isinstance(one, DataSource) else DataSource(path=one) for one in given)


def _problems(name: str, given: tuple[DataSource | str, ...]) -> list[Problem]:
    empty = [place for place, source in enumerate(given) if not source]
    if empty:
        return [Problem(f"{name}[{place}]", "is no path", "name a corpus") for place in empty]
    sources = normalize_sources(given)
    without = [place for place, source in enumerate(sources) if source.weight is None]
    if not without or len(without) == len(sources):
        return []
    where = f"{name}[{without[0]}].weight"
    return [Problem(where, "is left out where others have one", "weigh every source, or none")]
