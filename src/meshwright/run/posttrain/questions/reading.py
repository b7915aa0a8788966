"""Files of prompts, as tokens of the model that is asked, each with how its answers are judged.

Files and forms of records are those of the evaluation (`evaluate.questions`), and what is kept back
is what it asks with the same `validation`. Whatever a run held out, it does not train on: prompts
that stand in both parts are left out of training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import encode_chat
from meshwright.run.posttrain.data.forms import Chat
from meshwright.run.posttrain.data.prepared import is_of
from meshwright.run.posttrain.data.records import Record, read_records
from meshwright.run.posttrain.evaluate.final import number_of
from meshwright.run.posttrain.evaluate.prompts import tokens_of
from meshwright.run.posttrain.evaluate.questions import Exact, Prompt, Question, question_of
from meshwright.run.posttrain.questions.settings import ExactReward, NumberReward
from meshwright.run.posttrain.questions.task_settings import TaskSettings
from meshwright.run.serve.model.words import Words
from meshwright.run.train.data.selection import Split
from meshwright.spec.units import format_some

_NAMED = 8
"""Records that are named where many cannot be asked."""


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt without a right answer: what is said to it is judged by its form, or by a model."""

    prompt: Prompt
    where: str = ""


class Asked(NamedTuple):
    """A prompt that is asked."""

    tokens: tuple[int, ...]
    question: Question | Open
    tail: tuple[int, ...] = ()
    """What the template writes behind the end of an answer, where it is a chat."""


class Parts(NamedTuple):
    """All prompts of a run."""

    train: tuple[Asked, ...]
    held_out: tuple[Asked, ...]
    notes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """What tells these from others: prompts, and what is right."""
        found = blake2b(digest_size=6)
        for part in (self.train, self.held_out):
            for asked in part:
                right = msgspec.structs.replace(asked.question, prompt="", where="")
                found.update(msgspec.json.encode((asked.tokens, right)))
            found.update(b"|")
        return found.hexdigest()


def read_parts(task: TaskSettings, words: Words, *, room: int) -> Parts:
    """Read the prompts of a task that have at most `room` tokens."""
    if task.chat and not words.chats:
        what = "makes chats of prompts, and the model has no chat template"
        fix = "leave it out to have texts continued as they are, or give a model with a template"
        raise InputError([Problem("task.chat", what, fix)])
    read = _Reading(task, words, room)
    if task.held_out:
        train = read.part(task.train, "train", 0.0)
        held_out = read.part(task.held_out, "validation", 0.0)
    else:
        train = read.part(task.train, "train", task.validation)
        held_out = read.part(task.train, "validation", task.validation) if task.validation else []
    read.require()
    kept = {asked.tokens for asked in held_out}
    left = [asked for asked in train if asked.tokens not in kept]
    if not left:
        what = "holds no prompt to train on" + (" that is not held out as well" if train else "")
        raise InputError([Problem(task.train, what, "give more prompts, or hold fewer out")])
    notes = list(read.notes)
    if gone := len(train) - len(left):
        some = format_some(gone, "prompt")
        notes.append(f"{some} to train on stand among those held out, and are left out")
    return Parts(tuple(left), tuple(held_out), tuple(notes))


class _Reading:
    """Reads records of one task, and gathers what is wrong with them."""

    def __init__(self, task: TaskSettings, words: Words, room: int) -> None:
        self._task, self._words, self._room = task, words, room
        self._needs = any(isinstance(each, ExactReward | NumberReward) for each in task.judged_by)
        self._numbers = any(isinstance(each, NumberReward) for each in task.judged_by)
        self._tail: tuple[int, ...] | None = None
        self._problems: list[Problem] = []
        self._continued = self._dropped = 0

    def part(self, path: str, split: Split, validation: float) -> list[Asked]:
        """Return the prompts of a file that are of a split."""
        found = []
        for number, record in enumerate(read_records([path])):
            if not is_of(number, split, validation):
                continue
            try:
                asked = self._asked(record)
            except InputError as error:
                # Only what a template says of a chat has another place than the record's own.
                self._problems += [
                    each
                    if each.where.startswith(record.where)
                    else each._replace(where=f"{record.where}: {each.where}")
                    for each in error.problems
                ]
                continue
            if asked is not None:
                found.append(asked)
        return found

    @property
    def notes(self) -> Iterator[str]:
        """Say what somebody might not expect."""
        if self._dropped:
            some = format_some(self._dropped, "prompt")
            yield f"{some} of more than {self._room:,} tokens left out (task.too_long = drop)"
        if self._continued and self._words.chats:
            some = format_some(self._continued, "prompt")
            what = "texts, which are continued without the model's chat template"
            yield f"{some} are {what}: task.chat=true asks them as messages of a user"

    def require(self) -> None:
        """Raise what is wrong, the first few records by name."""
        if len(self._problems) > _NAMED:
            more = f"{len(self._problems) - _NAMED:,} more are refused likewise"
            self._problems[_NAMED:] = [Problem(self._task.train, more, "mend them all")]
        if self._problems:
            raise InputError(self._problems)

    def _asked(self, record: Record) -> Asked | None:
        """Return what a record asks; None where it is too long and may be left out."""
        where, values = record.where, renamed(record, self._task.fields.renamed)
        question = question_of(Record(where, values)) if self._needs else _open(values, where)
        if self._numbers and isinstance(question, Exact):
            _require_number(question, where)
        prompt = self._prompt(question)
        tokens = tokens_of(self._words, prompt, self._task.options)
        if not tokens:
            what = "has a prompt without tokens"
            raise InputError([Problem(where, what, "begin the prompt with some text")])
        if len(tokens) > self._room:
            if self._task.too_long == "drop":
                self._dropped += 1
                return None
            what = f"has a prompt of {len(tokens):,} tokens, and there is room for {self._room:,}"
            more = "fewer max_tokens for answers"
            if self._room == self._task.max_prompt_tokens:
                more = "a higher task.max_prompt_tokens"
            fix = f"use task.too_long=drop to leave such out, or {more}"
            raise InputError([Problem(where, what, fix)])
        return Asked(tokens, question, () if isinstance(prompt, str) else self._behind(prompt))

    def _prompt(self, question: Question | Open) -> Prompt:
        """Return a prompt as it is asked."""
        task, prompt = self._task, question.prompt
        if isinstance(prompt, str):
            if not task.chat and not task.system:
                self._continued += 1
                return prompt
            if not task.chat:
                what = "has a prompt that is a text, before which stands no system's message"
                raise InputError([Problem(question.where, what, "set task.chat=true")])
            prompt = [{"role": "user", "content": prompt}]
        if not self._words.chats:
            what = "is a chat, and the model has no chat template"
            fix = "give prompts as texts, or a model with a template"
            raise InputError([Problem(question.where, what, fix)])
        if task.system and prompt[0].get("role") != "system":
            prompt = [{"role": "system", "content": task.system}, *prompt]
        return prompt

    def _behind(self, prompt: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        if self._tail is None:
            self._tail = tail_of(self._words, prompt, self._task.options)
        return self._tail


def tail_of(
    words: Words, prompt: Sequence[dict[str, Any]], values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the tokens that a template writes behind the end of an answer, and no model draws.

    A reward model was trained on whole chats, and gives its reward at their last token.
    """
    chat = Chat((*prompt, {"role": "assistant", "content": "yes"}), values=values)
    try:
        (example,) = encode_chat(words, chat, "last")
    except InputError:
        return ()  # a template that writes answers anew, on which none was trained either
    last = int(example.trained.nonzero()[0][-1])
    return tuple(int(token) for token in example.tokens[last + 1 :])


def renamed(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a record by our names, where it calls some otherwise."""
    given = {name: value for name, value in record.values.items() if value is not None}
    # What has one of our names, and is not what we mean by it, is nothing to us.
    others = {*names, "answers"} if "answer" in names else {*names}
    values = {name: value for name, value in given.items() if name not in others}
    for ours, theirs in names.items():
        found = _looked_up(given.get, theirs)
        if found is None and ours == "prompt":
            what = f"has no field {theirs!r}, which task.fields.prompt names"
            fix = f"name the one that prompts are in: there is {_some(given)}"
            raise InputError([Problem(record.where, what, fix)])
        if found is not None:
            values[ours] = found
    return values


def _looked_up(get: Callable[[str], object], path: str) -> object:
    found = get(path)
    if found is not None or "." not in path:
        return found
    first, _, rest = path.partition(".")
    inner = get(first)
    return _looked_up(inner.get, rest) if isinstance(inner, Mapping) else None


def _open(values: Mapping[str, Any], where: str) -> Open:
    """Take a prompt alone; what stands there as its answer is not looked at."""
    prompt = values.get("prompt")
    if prompt is None:
        prompt = values.get("messages")
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = prompt[:-1] if prompt[-1].get("role") == "assistant" else prompt
    try:
        found = msgspec.convert({"prompt": prompt, "where": where}, Open)
    except msgspec.ValidationError:
        what, fix = f"holds {_some(values)}, which is no prompt", "give prompt, or messages"
        raise InputError([Problem(where, what, fix)]) from None
    if not found.prompt:
        raise InputError([Problem(where, "has an empty prompt", "give it some text")])
    return found


def _some(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(values)[:8]) or "nothing"


def _require_number(question: Exact, where: str) -> None:
    if not any(number_of(each) is not None for each in question.answers):
        what = f"has the answer {question.answers[0][:60]!r}, which comes to no number"
        raise InputError([Problem(where, what, "use task.reward=exact, or mend it")])
