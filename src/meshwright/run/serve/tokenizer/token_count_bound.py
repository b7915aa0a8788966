"""`TokenCountBound`: tells of a long text that it has too many tokens, without encoding all of it.

A refusal must be certain, so it rests on what a token can stand for at most. That is known of
vocabularies in which bytes are tokens and nothing else of a text is dropped: byte-level BPE, and
BPE with byte fallback. A word piece model may read a megabyte as one unknown word; of such a model
nothing is claimed.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.run.serve.tokenizer.token_bytes import TokenBytes, byte_letters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG_BYTES_PER_TOKEN = 8
"""A text is counted in pieces only where its tokens would have to be longer than this on average:
prose has about four bytes to a token, so that ordinary prompts are encoded once."""
PIECE_BYTES = 2**16
_SHRINK = {"NFC": 4, "Prepend": 1, "Replace": 1}
"""By how much a normalizer may shorten a text in UTF-8: composing U+1F82 makes 3 bytes of 8."""
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
"""Pre-tokenizers that drop nothing."""


class TokenCountBound:
    """What the tokens of a vocabulary stand for at most."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._bound = _bound_of(tokenizer)

    @property
    def max_token_bytes(self) -> int | None:
        """Bytes of a text that one token stands for at most; None where nothing is certain."""
        return None if self._bound is None else self._bound.max_token_bytes

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Tell whether a text certainly has more tokens than this.

        Counting stops as soon as it is certain, so the cost is bounded by `max_tokens`, not by the
        text. A cut between pieces changes the tokens next to it and no others, at most as many as
        the longest token has bytes on either side; a piece is long enough that twice the tokens
        allowed cannot come of cuts.
        """
        if self._bound is None or len(text) <= LONG_BYTES_PER_TOKEN * max_tokens:
            return False
        longest, uncounted = self._bound
        if len(text) > longest * max_tokens:
            data = text.encode(errors="replace")
            if len(data.translate(None, uncounted)) > longest * max_tokens:
                return True
        step = max(PIECE_BYTES, 256 * longest)
        count = 0
        for begin in range(0, len(text), step):
            piece = text[begin : begin + step]
            count += len(self._tokenizer.encode(piece, add_special_tokens=False))
            if count > 2 * max_tokens + 2 * longest:
                return True
        return False


class _Bound(NamedTuple):
    max_token_bytes: int
    uncounted: bytes
    """Bytes of a text that may have no token at all."""


def _bound_of(tokenizer: "Tokenizer") -> _Bound | None:
    """Return what a token stands for at most; None where it is not certain."""
    if tokenizer.truncation is not None:
        return None  # a text of any length is cut to one that fits
    parts = {
        name: json.loads(part.__getstate__()) if part is not None else None
        for name in ("normalizer", "pre_tokenizer")
        for part in [getattr(tokenizer, name)]
    }
    shrink = _normalizer_shrink(parts["normalizer"])
    keeps = _drops_nothing(parts["pre_tokenizer"])
    missing = _bytes_without_token(tokenizer, parts["pre_tokenizer"])
    if shrink is None or missing is None or not keeps:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes all the spaces beside it
    spelled = TokenBytes(tokenizer)
    vocabulary = tokenizer.get_vocab()
    longest = max((len(spelled(number)) for number in vocabulary.values()), default=0)
    return _Bound(max(longest, 1) * shrink, missing)


def _steps(part: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for each in part.get(inside, ()) for step in _steps(each, inside)]
    return [part]


def _normalizer_shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    shrink = 1
    for step in _steps(normalizer, "normalizers"):
        kind = str(step.get("type"))
        if kind not in _SHRINK:
            return None
        if kind == "Replace":
            text = step.get("pattern", {}).get("String")
            if text is None or len(str(step.get("content", "")).encode()) < len(text.encode()):
                return None
        shrink *= _SHRINK[kind]
    return shrink


def _drops_nothing(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return all(
        step.get("type") in _KEEPING and step.get("behavior") != "Removed"
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _bytes_without_token(
    tokenizer: "Tokenizer", pre_tokenizer: Mapping[str, Any] | None
) -> bytes | None:
    """Return the bytes that no token spells, which may vanish or stand together as one unknown.

    None says that whole characters may do so.
    """
    from tokenizers import models
    from tokenizers.pre_tokenizers import ByteLevel

    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    steps = _steps(pre_tokenizer, "pretokenizers")
    if any(step.get("type") == "ByteLevel" for step in steps):
        missing = [x for x in ByteLevel.alphabet() if tokenizer.token_to_id(x) is None]
        return bytes(byte_letters()[letter] for letter in missing)
    all_there = all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return b"" if model.byte_fallback and all_there else None
