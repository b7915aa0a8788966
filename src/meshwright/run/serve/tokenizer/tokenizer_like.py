"""`TokenizerLike`: what the server needs of a tokenizer; `Tokenizer` has it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TokenizerLike(Protocol):
    """Texts to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """Tokens are numbers below this one."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Special tokens, which answers do not show."""

    def encode(self, text: str, /, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the model's first token where `special` and it has one.

        Special tokens that are written out in the text are always taken for themselves.
        """

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """Return the text of tokens; what is no text comes as U+FFFD."""

    def token_bytes(self, token: int, /) -> bytes:
        """Return the bytes that a token stands for; special ones as they are written."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> str:
        """Return the messages as the model's template writes them; `values` are the template's.

        Raises `InputError` where there is no template, or it refuses these messages.
        """
