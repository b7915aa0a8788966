"""What a record says: chats or texts whose answers are trained, alone, in pairs or with a verdict.

    {"messages": […], "tools": […]}                     a chat
    {"prompt": …, "completion": …}                      a prompt and what shall follow it
    {"prompt": …, "chosen": …, "rejected": …}           two answers, of which one is liked better
    {"prompt": …, "completion": …, "label": true}       an answer that is liked, or is not

Prompts and answers are texts, or lists of messages as OpenAI's interface has them. Where a pair has
no `prompt`, what both begin with is it: messages, or words of texts. A message with `"weight": 0`
is not trained. `conversations` of `from` and `value`, as ShareGPT has them, are messages, too.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple, cast

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.serve.tokenizer.message_format import normalize_message
from meshwright.spec.serialization import format_value

DatasetKind = Literal["chats", "pairs", "verdicts"]
_FIX = "give `messages`, `prompt` with `completion` (and `label`), or `chosen` with `rejected`"
_SIDES = ("chosen", "rejected")
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of messages, by what ShareGPT calls who speaks."""


class ChatExample(NamedTuple):
    """A conversation."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = {}
    """Names that the template may ask for."""
    num_prompt_messages: int = 0
    """The first so many messages are a prompt: nothing of them is trained."""
    untrained_messages: frozenset[int] = frozenset()
    """Messages that are left out besides."""


class TextExample(NamedTuple):
    """A prompt and its continuation, without a template."""

    prompt: str
    completion: str


class ParsedRecord(NamedTuple):
    """One record, understood."""

    kind: DatasetKind
    examples: tuple[ChatExample | TextExample, ...]
    """One, or the chosen answer and then the rejected one."""
    is_preferred: bool = True
    """The verdict, where it is one."""


def parse_record(record: DataRecord) -> ParsedRecord:
    """Understand a record; one that says nothing known is refused by name."""
    values = {name: value for name, value in record.values.items() if value is not None}
    where = record.source
    if "chosen" in values and "rejected" in values:
        return ParsedRecord("pairs", _pair(values, where))
    if "conversations" in values and "messages" not in values:
        values["messages"] = _spoken(values["conversations"], where)
    if "messages" in values:
        chat = _chat(values, _messages(values["messages"], where, "messages"))
        return _judged(values, chat, where)
    if "prompt" in values and "completion" in values:
        return _judged(values, _continued(values, values["completion"], where), where)
    names = ", ".join(sorted(values)[:8]) or "nothing"
    raise InputError([Problem(where, f"holds {names}, which is no chat", _FIX)])


def _judged(values: Mapping[str, Any], one: ChatExample | TextExample, where: str) -> ParsedRecord:
    if "label" not in values:
        return ParsedRecord("chats", (one,))
    label = values["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        what = f"has the label {label!r}"
        raise InputError([Problem(where, what, "use true for liked answers, and false")])
    return ParsedRecord("verdicts", (one,), bool(label))


def _spoken(given: object, where: str) -> list[dict[str, Any]]:
    """Return the turns of a ShareGPT conversation as messages."""
    turns = given if isinstance(given, list) else []
    found = []
    for number, turn in enumerate(turns, 1):
        role = _SPEAKERS.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None:
            what = f"turn {number} of conversations is from none of {', '.join(_SPEAKERS)}"
            raise InputError([Problem(where, what, "give messages of role and content")])
        found.append({"role": role, "content": turn.get("value")})
    return found


def _pair(values: Mapping[str, Any], where: str) -> tuple[ChatExample | TextExample, ...]:
    both = values["chosen"], values["rejected"]
    if "prompt" in values and not _hold(both, values["prompt"]):
        return tuple(_continued(values, one, where) for one in both)
    fix = "give what comes before them as `prompt`"
    if all(isinstance(one, str) for one in both):
        # Cut between words: who begins alike may go on within one.
        prompt = both[0][: _alike(both)].rpartition(" ")[0]
        if not prompt.strip() or any(not one[len(prompt) :].strip() for one in both):
            what = "has two texts that begin with nothing in common, or do not differ"
            raise InputError([Problem(where, what, fix)])
        return tuple(TextExample(prompt, one[len(prompt) :]) for one in both)
    sides = [_messages(one, where, name) for one, name in zip(both, _SIDES, strict=True)]
    same = _alike(sides)
    if not same or same == min(map(len, sides)):
        what = "has two answers that share no prompt, or do not differ"
        raise InputError([Problem(where, what, fix)])
    return tuple(_chat(values, side, given=same) for side in sides)


def _alike(sides: Sequence[Sequence[object]]) -> int:
    """Return how much two sequences begin with in common."""
    pairs = zip(*sides, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _hold(both: tuple[Any, Any], prompt: object) -> bool:
    """Tell whether two lists of messages begin with a prompt that is given as a text as well."""
    firsts = [one[0] for one in both if isinstance(one, list) and one]
    return len(firsts) == len(both) and all(
        isinstance(first, dict) and first.get("role") == "user" and first.get("content") == prompt
        for first in firsts
    )


def _continued(values: Mapping[str, Any], answer: object, where: str) -> ChatExample | TextExample:
    prompt = values["prompt"]
    if isinstance(prompt, str) and isinstance(answer, str):
        return TextExample(prompt, answer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = _messages(prompt, where, "prompt")
    # A prompt of messages may have its answer as a text.
    told = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return _chat(values, [*before, *_messages(told, where, "the answer")], given=len(before))


def _chat(
    values: Mapping[str, Any], messages: Sequence[dict[str, Any]], given: int = 0
) -> ChatExample:
    tools = values.get("tools") or None
    untrained = [number for number, one in enumerate(messages) if one.get("weight", 1) == 0]
    return ChatExample(
        tuple({name: one[name] for name in one if name != "weight"} for one in messages),
        None if tools is None else tuple(tools),
        values.get("chat_template_kwargs") or {},
        given,
        frozenset(untrained),
    )


def _messages(given: object, where: str, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list | tuple) or not given:
        what = f"{name} is {format_value(given)}, which is no list of messages"
        if isinstance(given, list | tuple):
            what = f"{name} is an empty list: there is no message to learn from"
        raise InputError([Problem(where, what, 'use [{"role": "user", "content": "…"}, …]')])
    found = []
    for number, one in enumerate(given, 1):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            what = f"message {number} of {name} has no role"
            raise InputError([Problem(where, what, "use role and content in each message")])
        if one.get("weight") not in (None, 0, 1):
            what = f"message {number} of {name} has the weight {one['weight']!r}"
            raise InputError([Problem(where, what, "use 0, which is not trained, or 1")])
        try:
            found.append(normalize_message(cast(dict[str, Any], one)))
        except InputError as error:
            (problem,) = error.problems
            at = f"{problem.where} " if problem.where else ""
            what = f"message {number} of {name}: {at}{problem.what}"
            raise InputError([Problem(where, what, problem.fix)]) from None
    return found
