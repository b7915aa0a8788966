"""What tokens mean to those who only count them: how many there are, and which ones are special.

Kept with tokenized text, so that two corpora of different tokenizers are never blended by mistake.
Knows no text and no files.
"""

from typing import Literal

import msgspec

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"
PAD_TOKEN = "<|pad|>"
"""Names of our own special tokens: those of Llama 3 where it has them."""

BYTE_TOKENIZER = "bytes"
"""Name of the built-in tokenizer."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a tokenizer."""

    name: str
    """What the tokenizer is called: `bytes`, or its file."""
    size: int
    """Ids run from 0 up to this, special ones included."""
    digest: str
    """Hash of its description: equal for equal tokenizers."""
    eos: int
    """Id that ends a document."""
    bos: int | None = None
    """Id put before a document, where one is."""
    pad: int | None = None
    """Id that fills a sequence up; None uses `eos`. Labels leave it out either way."""

    @property
    def padding_id(self) -> int:
        """Id that stands where a sequence holds no token."""
        return self.eos if self.pad is None else self.pad

    @property
    def dtype(self) -> Literal["uint16", "int32"]:
        """The smallest number format of the two in use that holds every id, as in Megatron."""
        return "uint16" if self.size <= 1 << 16 else "int32"
