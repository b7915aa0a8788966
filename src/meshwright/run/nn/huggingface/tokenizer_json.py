"""Opens `tokenizer.json` files of the `tokenizers` library, with bounds that the library lacks.

A file may ask to pad every text to any length, replace each letter by a thousand, or number its
tokens from four billion on. The first is turned off, as transformers does for a text alone; the
others are refused.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import convert_library_errors
from meshwright.spec.serialization import format_value

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_VOCAB_SIZE = 1 << 24
"""Tables of all tokens are made; the largest published vocabulary has a 60th of this."""
_MOST_GROWTH = 64
"""Times by which all replacements together may lengthen a text; published ones reach 3."""
_PROBE_TEXT = " ".join(("Hello, world!", "a" * 40, "x1" * 20, "é漢字🙂", "\t\r\n  .", "=" * 40))
"""A text that a damaged pattern fails at: some faults show only when a pattern is applied."""
_FIX = "fetch it again from where the model was published"


def open_tokenizer_json(text: str, where: str, *, fix: str = _FIX) -> "Tokenizer":
    """Make the tokenizer that a file describes; it neither cuts nor pads what it encodes."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingDependency(
            "reading text needs tokenizers, which is not installed", hint
        ) from error
    with convert_library_errors(where, "is not a tokenizer's JSON file", fix):
        made = Tokenizer.from_str(text)
        made.no_truncation()
        made.no_padding()
        last = max(made.get_vocab(with_added_tokens=True).values(), default=-1)
        parts = [
            json.loads(part.__getstate__()) for part in (made.normalizer, made.decoder) if part
        ]
    if last >= MAX_VOCAB_SIZE:
        what = f"has a token with the number {last:,}"
        raise InputError([Problem(where, what, f"use numbers below {MAX_VOCAB_SIZE:,}")])
    for part in parts:
        _check_growth(part, where)
    with convert_library_errors(where, "is not a tokenizer's JSON file", fix):
        made.encode(_PROBE_TEXT)
    return made


def _check_growth(part: object, where: str) -> None:
    growth = 1
    for content in _replacements(part):
        growth *= max(1, len(content))
        if growth > _MOST_GROWTH:
            what = f"lengthens a text without bound: it puts {format_value(content)} into it"
            raise InputError([Problem(where, what, _FIX)])


def _replacements(part: Any) -> Iterator[str]:
    """Yield what the steps of a normalizer or a decoder put in the place of a piece of text."""
    if isinstance(part, dict):
        for key in ("content", "prepend"):
            if isinstance(part.get(key), str):
                yield part[key]
        for value in part.values():
            yield from _replacements(value)
    elif isinstance(part, list):
        for item in part:
            yield from _replacements(item)
