"""The bytes of tokens: joined, they are the text, whatever way a tokenizer writes them."""

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from tests.run.serve.model.test_gguf import trained

TEXT = "naïve 🦖 日本 test"


def sentencepiece() -> Any:
    """Return a tokenizer that writes spaces as ▁ and falls back to bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + at for at, piece in enumerate(("▁", "t", "e", "s", "▁t", "▁te"))}
    model = tokenizers.models.BPE(
        vocab, [("▁", "t"), ("▁t", "e")], byte_fallback=True, unk_token=None
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    parts = tokenizers.decoders
    made.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()])
    return made


@pytest.mark.parametrize("make", [lambda: trained(digits=True), sentencepiece])
def test_bytes_of_tokens_join_to_the_text(make: Callable[[], Any]) -> None:
    words = Tokenizer(make())
    tokens = words.encode(TEXT, special=False)
    assert len(tokens) > len(TEXT) // 2
    assert b"".join(map(words.token_bytes, tokens)) == TEXT.encode()


def test_special_tokens_are_spelled_as_they_are_written() -> None:
    tokenizer = trained(digits=True)
    tokenizer.add_special_tokens(["<|end|>"])
    words = Tokenizer(tokenizer)
    number = words.token_to_id("<|end|>")
    assert number is not None
    assert words.token_bytes(number) == b"<|end|>"
    assert words.token_bytes(10**6) == b""
