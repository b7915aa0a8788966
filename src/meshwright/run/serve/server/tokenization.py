"""`PromptEncoder`: the tokens of texts and chats, with an early end for those that are too long."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.tokenizer.token_count_bound import TokenCountBound
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike


class PromptEncoder:
    """Encodes what requests give as prompts."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self._bound = (
            TokenCountBound(tokenizer.backend_tokenizer)
            if isinstance(tokenizer, Tokenizer)
            else None
        )

    def names_role(self, role: str) -> bool:
        """Tell whether the model's chat template has something for a role; yes where unknown."""
        if not isinstance(self.tokenizer, Tokenizer) or self.tokenizer.chat_template is None:
            return True
        return self.tokenizer.chat_template.names_role(role)

    def encode_text(
        self, text: str, param: str, *, special: bool, max_tokens: int
    ) -> tuple[int, ...]:
        """Return the tokens of a text, which may be more than `max_tokens` where that is near."""
        if self._bound is not None and self._bound.exceeds(text, max_tokens):
            raise too_many_tokens(param, max_tokens)
        try:
            return tuple(self.tokenizer.encode(text, special=special))
        except InputError as error:
            raise unservable_request(error, param) from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
        *,
        max_tokens: int,
        continues: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a chat; one that `continues` ends within its last message."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tools, **values)
            if continues:
                text = _cut_after(str(messages[-1].get("content") or ""), text)
        except InputError as error:
            raise unservable_request(error, "messages") from None
        # The template writes the first token itself.
        return self.encode_text(text, "messages", special=False, max_tokens=max_tokens)

    def decode(self, tokens: Sequence[int], param: str) -> str:
        """Return the text of tokens, special ones included."""
        try:
            return self.tokenizer.decode(tokens, skip_special=False)
        except InputError as error:
            raise unservable_request(error, param) from None


def too_many_tokens(param: str, max_tokens: int) -> ApiError:
    """Return the error of a prompt that is certainly too long, whose tokens were not counted."""
    what = f"`{param}` has more than {max_tokens} tokens, the maximum context length for it here"
    return ApiError(400, what, param=param, code="context_length_exceeded")


def _cut_after(last: str, text: str) -> str:
    """Return a chat up to the end of its last message, which templates may trim."""
    for written in (last, last.strip()):
        at = text.rfind(written) if written else -1
        if at >= 0:
            return text[: at + len(written)]
    where = "continue_final_message"
    what = "the last message has no text that the template writes as it is"
    raise InputError([Problem(where, what, "give it text, or leave this out")])


def validate_token_ids(
    tokens: Sequence[int], tokenizer: TokenizerLike, param: str
) -> tuple[int, ...]:
    """Return a prompt that was given as tokens, all of which the model must have."""
    if tokens and max(tokens) >= tokenizer.vocab_size:
        raise ApiError(
            400,
            f"`{param}` has the token {max(tokens)}; those of this model are below "
            f"{tokenizer.vocab_size}",
            param=param,
            code="invalid_token_id",
        )
    return tuple(tokens)
