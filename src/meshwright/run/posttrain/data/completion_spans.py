"""Where the answers of a chat stand in the text that the model's template writes.

A template that has `{% generation %}` says so itself. For others, the text up to an answer is what
serving would give as a prompt (`add_generation_prompt`), and the text through it is the chat that
ends there; both must be beginnings of the whole text, or the template writes history anew (as those
do that take thoughts out of earlier answers), and then what would be trained is not what is served.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.record_format import ChatExample
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer

TrainOn = Literal["assistant", "last", "each", "all"]
"""What is trained: all answers, the last, each as an example of its own with the chat before it as
the template writes it then, or every token."""
_ANSWERER = "assistant"


class CompletionSpans(NamedTuple):
    """A chat as text, with the spans that are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """First character of each, and the one after its last; in order, none empty."""
    exact: bool = True
    """Whether spans end where the model would; else what follows its end of turn is in them."""


def find_completion_spans(
    tokenizer: Tokenizer, chat: ChatExample, train_on: TrainOn
) -> list[CompletionSpans]:
    """Return the text of a chat with what is trained; several where each answer is an example."""
    if train_on == "all":
        text = tokenizer.apply_chat_template(
            chat.messages, chat.tools, **{**chat.template_kwargs, "add_generation_prompt": False}
        )
        return [CompletionSpans(text, ((0, len(text)),) if text else ())]
    wanted = [
        number
        for number, message in enumerate(chat.messages)
        if message["role"] == _ANSWERER
        and number >= chat.num_prompt_messages
        and number not in chat.untrained_messages
    ]
    if not wanted:
        return []
    if train_on == "each":
        return [_spread(tokenizer, chat, [number]) for number in wanted]
    return [_spread(tokenizer, chat, wanted[-1:] if train_on == "last" else wanted)]


def _spread(tokenizer: Tokenizer, chat: ChatExample, wanted: Sequence[int]) -> CompletionSpans:
    """Find answers; what comes after the last of them is left out."""
    messages = chat.messages[: wanted[-1] + 1]
    if tokenizer.chat_template is not None and tokenizer.chat_template.has_generation_marks:
        return _marked(tokenizer, chat, messages, wanted)
    values = {**chat.template_kwargs, "add_generation_prompt": False}
    whole = tokenizer.apply_chat_template(messages, chat.tools, **values)
    spans = []
    for number in wanted:
        prompt = tokenizer.apply_chat_template(
            messages[:number], chat.tools, **{**values, "add_generation_prompt": True}
        )
        through = tokenizer.apply_chat_template(messages[: number + 1], chat.tools, **values)
        if not whole.startswith(prompt):
            raise _rewritten(f"the prompt of message {number + 1}", prompt, whole, last=False)
        if not whole.startswith(through):
            raise _rewritten(f"message {number + 1}", through, whole, last=True)
        if len(prompt) < len(through):
            spans.append((len(prompt), len(through)))
    return CompletionSpans(whole, tuple(spans), exact=False)


def _marked(
    tokenizer: Tokenizer,
    chat: ChatExample,
    messages: Sequence[dict[str, Any]],
    wanted: Sequence[int],
) -> CompletionSpans:
    assert tokenizer.chat_template is not None
    text, spans = tokenizer.chat_template.render_with_spans(
        messages, tools=chat.tools, **chat.template_kwargs
    )
    every = [number for number, one in enumerate(messages) if one["role"] == _ANSWERER]
    if len(spans) != len(every) and len(wanted) != len(every):
        what = f"marks {len(spans)} spans in a chat of {len(every)} answers"
        fix = "train all answers, or mark each answer once"
        raise InputError([Problem("chat_template", what, fix)])
    chosen = [
        span
        for place, span in enumerate(spans)
        if span[0] < span[1] and (len(spans) != len(every) or every[place] in wanted)
    ]
    return CompletionSpans(text, tuple(chosen))


def _rewritten(what: str, part: str, whole: str, *, last: bool) -> InputError:
    at = next(
        (
            place
            for place, (one, other) in enumerate(zip(part, whole, strict=False))
            if one != other
        ),
        min(len(part), len(whole)),
    )
    saw = f"{part[at : at + 24]!r} became {whole[at : at + 24]!r}"
    why = "once others follow it" if last else "once it is answered"
    fix = (
        "train each answer as an example of its own (train_on = each)"
        if last
        else "give the answer as the model writes it (its thoughts too), or mend the template"
    )
    told = f"writes {what} differently {why}: at character {at:,} {saw}"
    return InputError([Problem("chat_template", told, fix)])
