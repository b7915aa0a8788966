"""Open a source, whatever lies at its path; text is tokenised into the cache first."""

import sys
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.corpus import Corpus
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.data.lock import alone
from meshwright.run.train.data.megatron import check_megatron, open_megatron, pair_of
from meshwright.run.train.data.settings import DataSettings, as_sources
from meshwright.run.train.data.shards import check_shards, is_shards, open_shards
from meshwright.run.train.data.standard import is_standard
from meshwright.run.train.data.text import list_files
from meshwright.run.train.data.tokenising import tokenise
from meshwright.run.train.data.tokenizer import open_tokenizer
from meshwright.timeline.paths import refusals


def open_corpus(path: str) -> Corpus:
    """Open tokenised text: a folder of shards, or Megatron's `.bin` and `.idx`."""
    place = Path(path)
    if is_shards(place):
        return open_shards(place)
    if pair_of(place) is not None:
        return open_megatron(place)
    raise InputError([_no_corpus(path)])


def check_corpus(path: str) -> list[Problem]:
    """Read all of it that can be checked and return what is damaged."""
    place = Path(path)
    return check_shards(place) if is_shards(place) else check_megatron(place)


def _no_corpus(path: str) -> Problem:
    place = Path(path)
    partial = place.with_name(f"{place.name}.partial")
    if is_standard(path) or (place.exists() and not partial.exists()):
        what = "is not tokenised text"
        return Problem(path, what, f"mw data tokenize {path} --out FOLDER --tokenizer bytes")
    if partial.exists():
        what = "was not tokenised to its end"
        return Problem(path, what, "run the same mw data tokenize again: it goes on from there")
    what = "there is no such folder of shards, nor .bin and .idx files"
    return Problem(path, what, "name what mw data tokenize wrote")


def source_problems(settings: DataSettings) -> list[Problem]:
    """Return which sources of a run are not there, or text that nothing tokenises; opens none."""
    given = as_sources((*settings.sources, *settings.validation_sources))
    found = (_refusal(source.path, settings) for source in given)
    return list(dict.fromkeys(problem for problem in found if problem is not None))


def _refusal(path: str, settings: DataSettings) -> Problem | None:
    if _is_tokenised(path):
        return None
    if not is_standard(path) and not Path(path).exists():
        return _no_corpus(path)
    if not settings.cache:
        problem = _no_corpus(path)
        return problem._replace(fix=f"set data.cache to tokenise it there, or: {problem.fix}")
    if not settings.tokenizer:
        fix = "set data.tokenizer to bytes, or to a tokenizer's JSON file"
        return Problem(path, "is text, and no tokenizer is named", fix)
    return None


def open_source(path: str, settings: DataSettings) -> Corpus:
    """Open a source of a run."""
    refusal = _refusal(path, settings)
    if refusal is not None:
        raise InputError([refusal])
    if _is_tokenised(path):
        return open_corpus(path)
    tokenizer = open_tokenizer(settings.tokenizer)
    name = fingerprint(path, _state(path), tokenizer.vocabulary.digest, settings.field)
    out = Path(settings.cache) / f"tokens-{name[:16]}"
    with refusals(out, "written"), alone(out.parent, out.name):
        if not is_shards(out):
            tokenise([path], out, tokenizer, field=settings.field)
    return open_shards(out)


def plan_folder(path: str, settings: DataSettings) -> Path | None:
    """Return where the packing plans of a source lie."""
    if settings.cache:
        return Path(settings.cache) / "plans"
    place = Path(path)
    if is_shards(place):
        return place / "plans"
    pair = pair_of(place)
    return None if pair is None else pair.documents.with_suffix(".plans")


def _is_tokenised(path: str) -> bool:
    return is_shards(Path(path)) or pair_of(Path(path)) is not None


def _state(path: str) -> str:
    """Say what a text is made of, so that changed files are tokenised again."""
    if is_standard(path):
        return sys.version
    stats = [(str(file), file.stat()) for file in list_files([Path(path)])]
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
