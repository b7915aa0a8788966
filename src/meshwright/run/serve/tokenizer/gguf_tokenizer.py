"""The tokenizer inside a GGUF file, as an object of the `tokenizers` library.

A file has the tokens with their kinds, and either merges in order (byte-level BPE, `gpt2`) or a
score for each token (SentencePiece's BPE, `llama`). How text is cut before byte-level merges is
only named there; the rules behind the names are those of the models' published tokenizers.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import convert_library_errors
from meshwright.run.serve.model.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER = 3, 4
"""Kinds of token: control tokens, and words that are never cut. (1 is normal, 6 a byte.)"""

_LONGEST_PIECE = 1024
"""Letters of a token with a score. Merges are found by cutting each token everywhere."""
_AGAIN = "use a complete file of llama.cpp's converter"

_DIGITS_OF_THREE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's cuts: letters with one sign before them, up to three digits, signs, ends of lines."""
_SINGLE_DIGITS = _DIGITS_OF_THREE.replace("{1,3}", "")


class _Cut(NamedTuple):
    """How text is cut before merges."""

    pattern: str | None = None
    """Pieces; None takes those of GPT-2."""
    digits: bool = False
    """Each digit stands alone."""
    normal: bool = False
    """Characters are composed first (NFC)."""
    whole: bool = False
    """A piece that is a token is one, whatever merges say."""


_CUTS: Mapping[str, _Cut] = {
    "default": _Cut(),
    "gpt-2": _Cut(),
    "smollm": _Cut(digits=True),
    "llama-bpe": _Cut(_DIGITS_OF_THREE, whole=True),
    "llama3": _Cut(_DIGITS_OF_THREE, whole=True),
    "qwen2": _Cut(_SINGLE_DIGITS, normal=True),
}


def tokenizer_from_gguf(file: GgufFile) -> tuple["Tokenizer", dict[str, str], set[int]]:
    """Return the tokenizer, the words of special tokens by their role, and the ends of text."""
    kind = file.metadata_str("tokenizer.ggml.model")
    tokens = file.metadata_texts("tokenizer.ggml.tokens")
    kinds = file.metadata_ints("tokenizer.ggml.token_type") or [1] * len(tokens)
    _require_one_for_each_token(file, "token_type", kinds, tokens)
    where = f"{file.path}: tokenizer.ggml"
    with convert_library_errors(where, "is no vocabulary of the tokenizers library", _AGAIN):
        match kind:
            case "gpt2":
                tokenizer = _byte_level(file, tokens)
            case "llama":
                tokenizer = _sentence_pieces(file, tokens)
            case _:
                what = f"{kind!r} is no tokenizer that is known here"
                raise InputError([Problem(f"{where}.model", what, "use a file with gpt2 or llama")])
        _add_special(tokenizer, tokens, kinds)
        special = {}
        for role, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
            number = _token_id(file, name)
            if number is not None and number < len(tokens):
                special[role] = tokens[number]
        _begin(tokenizer, file, special.get("bos_token"), default=kind == "llama")
    found = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    return tokenizer, special, {number for number in found if number is not None}


def _token_id(file: GgufFile, name: str) -> int | None:
    """Return the number that the file gives to a token of a role; None where it gives none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if file.metadata(key) is None:
        return None
    number = file.metadata_int(key)
    return number if number >= 0 else None


def _require_one_for_each_token(
    file: GgufFile, name: str, values: Sequence[object], tokens: Sequence[str]
) -> None:
    if len(values) != len(tokens):
        where = f"{file.path}: tokenizer.ggml.{name}"
        what = f"has {len(values):,} values for {len(tokens):,} tokens"
        raise InputError([Problem(where, what, _AGAIN)])


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> "Tokenizer":
    parts = _library()
    name = file.metadata_str("tokenizer.ggml.pre", "default")
    cut = _CUTS.get(name)
    if cut is None:
        known = ", ".join(sorted(_CUTS))
        what = f"text is cut as {name!r}, which is not known here"
        where = f"{file.path}: tokenizer.ggml.pre"
        raise InputError([Problem(where, what, f"use one of {known}, or a Hugging Face folder")])
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata_texts("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer: Tokenizer = parts.Tokenizer(
        parts.models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=cut.whole)
    )
    steps = []
    if cut.digits:
        steps.append(parts.pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        pattern = parts.Regex(cut.pattern)
        steps.append(parts.pre_tokenizers.Split(pattern, "isolated"))
    steps.append(
        parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None)
    )
    tokenizer.pre_tokenizer = parts.pre_tokenizers.Sequence(steps)
    if cut.normal:
        tokenizer.normalizer = parts.normalizers.NFC()
    tokenizer.decoder = parts.decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(file: GgufFile, tokens: Sequence[str]) -> "Tokenizer":
    parts = _library()
    scores = file.metadata_floats("tokenizer.ggml.scores")
    _require_one_for_each_token(file, "scores", scores, tokens)
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = _token_id(file, "unknown") or 0
    longest = max(map(len, tokens), default=0)
    if unknown >= len(tokens) or longest > _LONGEST_PIECE:
        what = f"has {len(tokens):,} tokens, unknown ones as {unknown:,}, up to {longest:,} letters"
        raise InputError([Problem(f"{file.path}: tokenizer.ggml.tokens", what, _AGAIN)])
    tokenizer: Tokenizer = parts.Tokenizer(
        parts.models.BPE(
            vocab=vocab,
            merges=_merges_by_score(tokens, scores, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    leads = file.metadata_bool("tokenizer.ggml.add_space_prefix", default=True)
    normal, decoders = parts.normalizers, parts.decoders
    steps = [normal.Prepend("▁")] if leads else []
    tokenizer.normalizer = normal.Sequence([*steps, normal.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if leads:
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the merges that always make the best token next: those of the highest score first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], (left, right)))
    found.sort()
    return [pair for *_, pair in found]


def _add_special(tokenizer: "Tokenizer", tokens: Sequence[str], kinds: Sequence[int]) -> None:
    parts = _library()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER]
    added = parts.AddedToken
    tokenizer.add_special_tokens([added(token, normalized=False) for token in control])
    tokenizer.add_tokens([added(token, normalized=False) for token in whole])


def _begin(tokenizer: "Tokenizer", file: GgufFile, word: str | None, *, default: bool) -> None:
    """Let prompts begin with the token that begins a text, where the file says so."""
    if word is None or not file.metadata_bool("tokenizer.ggml.add_bos_token", default):
        return
    parts = _library()
    number = tokenizer.token_to_id(word)
    tokenizer.post_processor = parts.processors.TemplateProcessing(
        single=f"{word} $A", pair=f"{word} $A $B", special_tokens=[(word, number)]
    )


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingDependency(
            "reading text needs tokenizers, which is not installed", hint
        ) from error
    del decoders, models, normalizers, pre_tokenizers, processors
    return tokenizers
