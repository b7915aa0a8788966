"""Open a source, whatever lies at its path; text is tokenized into the cache first."""

import shlex
import sys
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.run.train.data.corpus.corpus import Corpus
from meshwright.run.train.data.corpus.megatron_dataset import (
    check_megatron,
    find_megatron_files,
    open_megatron,
)
from meshwright.run.train.data.corpus.token_shards import (
    check_token_shards,
    is_token_shards,
    open_token_shards,
)
from meshwright.run.train.data.data_config import DataConfig, normalize_sources
from meshwright.run.train.data.fingerprint import compute_fingerprint
from meshwright.run.train.data.tokenization.builtin_text import is_builtin
from meshwright.run.train.data.tokenization.corpus_tokenization import tokenize_files
from meshwright.run.train.data.tokenization.process_lock import acquire_exclusive_lock
from meshwright.run.train.data.tokenization.text_files import list_files
from meshwright.run.train.data.tokenization.tokenizer import open_tokenizer


def open_corpus(path: str) -> Corpus:
    """Open tokenized text: a folder of shards, or Megatron's `.bin` and `.idx`."""
    place = Path(path)
    if is_token_shards(place):
        return open_token_shards(place)
    if find_megatron_files(place) is not None:
        return open_megatron(place)
    raise InputError([_no_corpus(path)])


def check_corpus(path: str) -> list[Problem]:
    """Read all of it that can be checked and return what is damaged."""
    place = Path(path)
    return check_token_shards(place) if is_token_shards(place) else check_megatron(place)


def _no_corpus(path: str) -> Problem:
    place = Path(path)
    partial = place.with_name(f"{place.name}.partial")
    if is_builtin(path) or (place.exists() and not partial.exists()):
        what = "is not tokenized text"
        return Problem(
            path, what, f"mw data tokenize {shlex.quote(path)} --out FOLDER --tokenizer bytes"
        )
    if partial.exists():
        what = "tokenization is incomplete"
        return Problem(path, what, "run the same mw data tokenize again: it goes on from there")
    if _is_named_like_text(place):
        return Problem(path, "there is no such file", "check the path of the text")
    what = "there is no such folder of shards, nor .bin and .idx files"
    return Problem(path, what, "name what mw data tokenize wrote")


def _is_named_like_text(place: Path) -> bool:
    name = place.name.removesuffix(".gz").removesuffix(".zst")
    return Path(name).suffix in (".jsonl", ".json", ".txt", ".md", ".parquet")


def find_source_problems(settings: DataConfig) -> list[Problem]:
    """Return which sources of a run are not there, or text that nothing tokenizes; opens none."""
    given = normalize_sources((*settings.sources, *settings.validation_sources))
    found = (_refusal(source.path, settings) for source in given)
    return list(dict.fromkeys(problem for problem in found if problem is not None))


def _refusal(path: str, settings: DataConfig) -> Problem | None:
    if _is_tokenized(path):
        return None
    if not is_builtin(path) and not Path(path).exists():
        return _no_corpus(path)
    if not settings.cache_dir:
        problem = _no_corpus(path)
        return problem._replace(fix=f"set data.cache_dir to tokenize it there, or: {problem.fix}")
    if not settings.tokenizer:
        fix = "set data.tokenizer to bytes, or to a tokenizer's JSON file"
        return Problem(path, "is text, and no tokenizer is named", fix)
    return None


def open_source(path: str, settings: DataConfig) -> Corpus:
    """Open a source of a run."""
    refusal = _refusal(path, settings)
    if refusal is not None:
        raise InputError([refusal])
    if _is_tokenized(path):
        return open_corpus(path)
    tokenizer = open_tokenizer(settings.tokenizer)
    name = compute_fingerprint(path, _state(path), tokenizer.vocabulary.digest, settings.text_field)
    out = Path(settings.cache_dir) / f"tokens-{name[:16]}"
    with convert_os_errors(out, "write"), acquire_exclusive_lock(out.parent, out.name):
        if not is_token_shards(out):
            tokenize_files([path], out, tokenizer, field=settings.text_field)
    return open_token_shards(out)


def get_packing_cache_folder(path: str, settings: DataConfig) -> Path | None:
    """Return where the packing plans of a source lie."""
    if settings.cache_dir:
        return Path(settings.cache_dir) / "plans"
    place = Path(path)
    if is_token_shards(place):
        return place / "plans"
    pair = find_megatron_files(place)
    return None if pair is None else pair.documents.with_suffix(".plans")


def _is_tokenized(path: str) -> bool:
    return is_token_shards(Path(path)) or find_megatron_files(Path(path)) is not None


def _state(path: str) -> str:
    """Say what a text is made of, so that changed files are tokenized again."""
    if is_builtin(path):
        return sys.version
    stats = [(str(file), file.stat()) for file in list_files([Path(path)])]
    return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
