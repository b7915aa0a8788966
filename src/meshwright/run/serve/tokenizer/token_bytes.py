"""`TokenBytes`: the bytes that each token of a vocabulary stands for.

Texts of single tokens lose what is no whole character; their bytes can be joined again.
"""

import json
import re
from functools import cache
from typing import TYPE_CHECKING

from meshwright.file_errors import convert_library_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NO_DECODE = "its rules fail at a token"
_NO_DECODE_FIX = "use the tokenizer.json that the model was published with"
_SPACE = "▁"
"""How SentencePiece writes a space."""


class TokenBytes:
    """Spells tokens as their tokenizer's decoder would."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added = {
            number: token.content.encode()
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = tokenizer.decoder
        self._kind = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))

    def __call__(self, number: int) -> bytes:
        """Return the bytes of a token; special ones are spelled as they are written."""
        if number in self._added:
            return self._added[number]
        piece: str | None = self._tokenizer.id_to_token(number)
        if piece is None:
            return b""
        if "ByteLevel" in self._kind:
            letters = byte_letters()
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
        elif byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        elif _SPACE in piece:
            return piece.replace(_SPACE, " ").encode()
        with convert_library_errors("tokenizer.json", _NO_DECODE, _NO_DECODE_FIX):
            text: str = self._tokenizer.decode([number], skip_special_tokens=False)
        return text.encode()


@cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter that byte-level BPE writes.

    Bytes that print in Latin-1 are themselves; the others have the letters from U+0100 up, in their
    order (GPT-2, Radford et al. 2019).
    """
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    printing = {letter: ord(letter) for letter in letters if ord(letter) < 0x100}
    others = [byte for byte in range(0x100) if byte not in printing.values()]
    rest = [letter for letter in letters if letter not in printing]
    return printing | dict(zip(rest, others, strict=True))
