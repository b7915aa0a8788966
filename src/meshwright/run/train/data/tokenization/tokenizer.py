"""Tokenizers: the built-in one of bytes, or any JSON file of the `tokenizers` library.

A tokenizer here turns texts into ids and back and says which ids are special; where a document
begins and ends is marked by whoever writes it. Special tokens spelled out in a text stay text.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.file_errors import convert_library_errors, convert_os_errors
from meshwright.run.nn.huggingface.tokenizer_json import open_tokenizer_json
from meshwright.run.train.data.corpus.vocabulary import (
    BOS_TOKEN,
    BYTE_TOKENIZER,
    EOS_TOKEN,
    PAD_TOKEN,
    Vocabulary,
)
from meshwright.run.train.data.tokenization.byte_tokenizer import ByteTokenizer

_NO_ENCODE = "its rules fail at this text"
_NO_ENCODE_FIX = "use the tokenizer.json that the model was published with"
_ENDS = (
    EOS_TOKEN,
    "<|endoftext|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|return|>",
    "[EOS]",
    "<|im_end|>",
)
_PADS = (PAD_TOKEN, "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|▁pad▁|>", "<PAD>")


class TextTokenizer(Protocol):
    """Turns texts into ids and back."""

    vocabulary: Vocabulary
    json: str
    """Its description, as the `tokenizers` library reads it."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, without special ones."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids; special ones are written by name."""


def open_tokenizer(path: str, *, begin: str = "", end: str = "") -> TextTokenizer:
    """Open `bytes`, a tokenizer's JSON file, or a folder that holds a `tokenizer.json`.

    `begin` and `end` name the tokens around a document. Without `begin` there is none; `end` is
    taken from the `tokenizer_config.json` beside it, or is the one usual name that it knows.
    """
    if path == BYTE_TOKENIZER:
        return ByteTokenizer(begin=begin, end=end)
    place = Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.exists():
        what = "there is no such tokenizer"
        fix = f"name a tokenizer's JSON file, its folder, or {BYTE_TOKENIZER}"
        raise InputError([Problem(path, what, fix)])
    with convert_os_errors(file, "read"):
        text = file.read_text(encoding="utf-8", errors="replace")
    made = _from_json(text, file)
    end = end or _configured_end(file.with_name("tokenizer_config.json"))
    return HFTokenizer(text, made, _vocabulary(text, made, file, begin=begin, end=end))


def open_saved_tokenizer(folder: Path, vocabulary: Vocabulary) -> TextTokenizer:
    """Open the tokenizer that is kept with tokenized text."""
    if vocabulary.name == BYTE_TOKENIZER:
        return ByteTokenizer(begin=BOS_TOKEN if vocabulary.bos is not None else "")
    file = folder / "tokenizer.json"
    with convert_os_errors(file, "read"):
        text = file.read_text(encoding="utf-8", errors="replace")
    return HFTokenizer(text, _from_json(text, file), vocabulary)


class HFTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, text: str, made: Any, vocabulary: Vocabulary) -> None:
        self.json = text
        self.vocabulary = vocabulary
        self._made = made

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, without special ones."""
        with convert_library_errors(self.vocabulary.name, _NO_ENCODE, _NO_ENCODE_FIX):
            found = self._made.encode_batch_fast(
                [_sound(text) for text in texts], add_special_tokens=False
            )
        return [np.array(one.ids, np.int32) for one in found]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids; special ones are written by name."""
        with convert_library_errors(self.vocabulary.name, _NO_ENCODE, _NO_ENCODE_FIX):
            return str(self._made.decode([int(one) for one in ids], skip_special_tokens=False))


def _vocabulary(text: str, made: Any, file: Path, *, begin: str, end: str) -> Vocabulary:
    """Find the special ids of a tokenizer."""
    ids = {str(one.content): int(number) for number, one in _added(made)}
    if not end:
        end = next((name for name in _ENDS if name in ids), "")
    if not end:
        what = "no token is known to end a document"
        listed = ", ".join(sorted(ids)[:8]) or "no special ones"
        raise InputError([Problem(str(file), what, f"name it with `end`; it has {listed}")])
    return Vocabulary(
        name=file.name,
        # Ids need not be dense: some vocabularies leave holes before their special tokens.
        size=1 + max(made.get_vocab(with_added_tokens=True).values(), default=-1),
        digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        eos=_id_of(made, end, "end", file),
        bos=_id_of(made, begin, "begin", file) if begin else None,
        pad=next((ids[name] for name in _PADS if name in ids), None),
    )


def _added(made: Any) -> list[tuple[int, Any]]:
    return sorted(made.get_added_tokens_decoder().items())


def _id_of(made: Any, name: str, role: str, file: Path) -> int:
    number = made.token_to_id(name)
    if number is None:
        what = f"has no token {name!r} to {role} a document"
        listed = ", ".join(str(one.content) for _, one in _added(made)[:8]) or "none"
        raise InputError([Problem(str(file), what, f"its special tokens: {listed}")])
    return int(number)


def _sound(text: str) -> str:
    """Return text that UTF-8 can hold: the library panics at a lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def import_tokenizers() -> Any:
    """Import the `tokenizers` library, or say that it is missing."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        what = "the package tokenizers is not installed"
        raise MissingDependency(
            what, f"install meshwright[train], or use {BYTE_TOKENIZER}"
        ) from None
    return tokenizers


def _from_json(text: str, file: Path) -> Any:
    import_tokenizers()
    fix = "give the tokenizer.json of a model, or make one with mw data train-tokenizer"
    made = open_tokenizer_json(text, str(file), fix=fix)
    # Texts may spell special tokens out.
    made.encode_special_tokens = True
    return made


def _configured_end(file: Path) -> str:
    """Return the token that ends a document by a model's own configuration, if it names one."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    token = given.get("eos_token") if isinstance(given, dict) else None
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
