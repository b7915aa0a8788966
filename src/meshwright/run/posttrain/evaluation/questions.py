"""Questions with what is right, as lines of files have them.

    {"prompt": …, "answer": "4"}                         exact; several answers may be right
    {"messages": […, {"role": "assistant", …}]}          exact: the last answer of a chat
    {"prompt": …, "choices": ["a", "b"], "right": 1}     multiple choice
    {"prompt": …, "tests": "assert f(2) == 4"}           code; `prefix` stands before the answer

A prompt is a text, which is continued, or a list of messages, which is answered.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.prepared_dataset import is_in_split
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.train.data.document_split import SplitName

Prompt = str | list[dict[str, Any]]


class ExactMatchQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or any of several, word for word."""

    prompt: Prompt
    answers: list[str]
    where: str = ""


class MultipleChoiceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One of a few answers, all of which are known."""

    prompt: Prompt
    choices: list[str]
    right: int
    where: str = ""


class CodeQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A program that has to pass tests, which are Python behind it."""

    prompt: Prompt
    tests: str
    prefix: str = ""
    where: str = ""


Question = ExactMatchQuestion | MultipleChoiceQuestion | CodeQuestion
T = TypeVar("T", ExactMatchQuestion, MultipleChoiceQuestion, CodeQuestion)
_FIX = "give prompt with answer, with choices and right, or with tests; or messages"


def read_questions(
    sources: Sequence[str | Path] | Iterable[DataRecord],
    *,
    split: SplitName = "validation",
    validation: float = 0.0,
) -> list[Question]:
    """Read questions of files, or of records at hand.

    `validation` is the share that training held out: with it, only those records are asked, by the
    same rule as in `prepare_dataset`. Without it, all of them are.
    """
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    paths = [one for one in listed if isinstance(one, str | Path)]
    records = read_records(paths) if paths else (r for r in listed if isinstance(r, DataRecord))
    found = [
        parse_question(record)
        for number, record in enumerate(records)
        if is_in_split(number, split, validation)
    ]
    if not found:
        what = "there are no questions" + (" among what is held out" if validation else "")
        raise InputError([Problem("questions", what, _FIX)])
    return found


def parse_question(record: DataRecord) -> Question:
    """Understand a record; one that asks nothing known is refused by name."""
    values = {name: value for name, value in record.values.items() if value is not None}
    where = record.source
    if "messages" in values and "prompt" not in values:
        values |= _last_answer(values, where)
    if "choices" in values:
        found = _made(values, MultipleChoiceQuestion, ("prompt", "choices", "right"), where)
        _check_choices(found, where)
        return found
    if "tests" in values:
        return _made(values, CodeQuestion, ("prompt", "tests", "prefix"), where)
    given = values.get("answers", values.get("answer"))
    if given is None or "prompt" not in values:
        names = ", ".join(sorted(values)[:8]) or "nothing"
        raise InputError([Problem(where, f"holds {names}, which is no question", _FIX)])
    answers = given if isinstance(given, list) else [given]
    if not answers:
        raise InputError([Problem(where, "has no right answer", "give one or several")])
    # Files of sums have numbers there.
    texts = [str(one) if type(one) in (int, float) else one for one in answers]
    return _made(values | {"answers": texts}, ExactMatchQuestion, ("prompt", "answers"), where)


def _last_answer(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Take a chat as a question whose right answer is its last message, where it is the model's."""
    messages = values["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        raise InputError([Problem(where, "has no messages", _FIX)])
    if last.get("role") != "assistant":
        return {"prompt": messages}
    if "answer" in values or "choices" in values or "tests" in values:
        what = "is answered by its last message already"
        raise InputError([Problem(where, what, "end the messages with the question")])
    return {"prompt": messages[:-1], "answer": last.get("content")}


def _made(values: dict[str, Any], kind: type[T], names: Sequence[str], where: str) -> T:
    given = {name: values[name] for name in names if name in values}
    try:
        return msgspec.convert({**given, "where": where}, kind)
    except msgspec.ValidationError as error:
        raise InputError([Problem(where, f"asks what cannot be asked: {error}", _FIX)]) from None


def _check_choices(question: MultipleChoiceQuestion, where: str) -> None:
    count = len(question.choices)
    if not 0 <= question.right < count or count < 2 or "" in question.choices:
        what = f"has {count} choices, of which {question.right} is right"
        fix = "give two or more that are not empty, and the right one's number from 0"
        raise InputError([Problem(where, what, fix)])
    right = question.choices[question.right]
    if question.choices.count(right) > 1:
        what = f"has the right choice twice, {right!r}, and either is as likely as the other"
        raise InputError([Problem(where, what, "leave one of them out")])
