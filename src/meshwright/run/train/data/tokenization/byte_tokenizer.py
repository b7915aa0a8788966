"""A tokenizer that every machine has: one token per UTF-8 byte, and three special ones.

Its ids are the bytes themselves (0 to 255), then begin, end and padding. No text can spell a
special token. Needs numpy only.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.corpus.vocabulary import (
    BOS_TOKEN,
    BYTE_TOKENIZER,
    EOS_TOKEN,
    PAD_TOKEN,
    Vocabulary,
)

_SPECIAL = {BOS_TOKEN: 256, EOS_TOKEN: 257, PAD_TOKEN: 258}


class ByteTokenizer:
    """Turns text into its bytes and back; `begin` names the token put before documents, if any."""

    def __init__(self, *, begin: str = "", end: str = EOS_TOKEN) -> None:
        for role, word, known in (("begin", begin, BOS_TOKEN), ("end", end, EOS_TOKEN)):
            if word not in ("", known):
                what = f"the byte tokenizer knows {known}, not {word}"
                raise InputError([Problem(role, what, f"leave {role} out")])
        self.json = _as_json()
        self.vocabulary = Vocabulary(
            name=BYTE_TOKENIZER,
            size=256 + len(_SPECIAL),
            digest=hashlib.blake2b(self.json.encode(), digest_size=16).hexdigest(),
            bos=_SPECIAL[begin] if begin else None,
            eos=_SPECIAL[EOS_TOKEN],
            pad=_SPECIAL[PAD_TOKEN],
        )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, without special ones."""
        # A lone surrogate, which JSON can spell, has no UTF-8; it becomes a question mark.
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids; special ones are written by name."""
        names = {number: name.encode() for name, number in _SPECIAL.items()}
        pieces = (names.get(int(one)) or bytes([int(one)]) for one in ids)
        return b"".join(pieces).decode("utf-8", "replace")


def _as_json() -> str:
    """Describe the same tokenizer to the `tokenizers` library: a BPE without merges."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    description: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags, "special": True}
            for name, number in _SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }
    return json.dumps(description, ensure_ascii=False)


def _letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte.

    Bytes that print as themselves in Latin-1 stay; the others take letters from U+0100 up (GPT-2,
    Radford et al. 2019, `bytes_to_unicode`).
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
