"""Files of prompts, as tokens of the model that is asked, each with how its answers are judged.

Files and forms of records are those of the evaluation (`evaluation.questions`), and what is kept
back is what it asks with the same `validation`. Whatever a run held out, it does not train on:
prompts that stand in both parts are left out of training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import encode_chat
from meshwright.run.posttrain.data.prepared_dataset import is_in_split
from meshwright.run.posttrain.data.record_format import ChatExample
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.posttrain.evaluation.final_answer import extract_final_number
from meshwright.run.posttrain.evaluation.prompts import encode_prompt
from meshwright.run.posttrain.evaluation.questions import (
    ExactMatchQuestion,
    Prompt,
    Question,
    parse_question,
)
from meshwright.run.posttrain.prompt_task.reward_config import ExactReward, NumberReward
from meshwright.run.posttrain.prompt_task.task_config import TaskConfig
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.run.train.data.document_split import SplitName
from meshwright.spec.units import format_quantity

_NAMED = 8
"""Records that are named where many cannot be asked."""


class OpenQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt without a right answer: what is said to it is judged by its form, or by a model."""

    prompt: Prompt
    where: str = ""


class TaskPrompt(NamedTuple):
    """A prompt that is asked."""

    token_ids: tuple[int, ...]
    question: Question | OpenQuestion
    template_suffix: tuple[int, ...] = ()
    """What the template writes behind the end of an answer, where it is a chat."""


class PromptSplits(NamedTuple):
    """All prompts of a run."""

    train: tuple[TaskPrompt, ...]
    held_out: tuple[TaskPrompt, ...]
    notes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """What tells these from others: prompts, and what is right."""
        found = blake2b(digest_size=6)
        for part in (self.train, self.held_out):
            for asked in part:
                right = msgspec.structs.replace(asked.question, prompt="", where="")
                found.update(msgspec.json.encode((asked.token_ids, right)))
            found.update(b"|")
        return found.hexdigest()


def read_prompt_splits(task: TaskConfig, tokenizer: Tokenizer, *, room: int) -> PromptSplits:
    """Read the prompts of a task that have at most `room` tokens."""
    if task.chat and not tokenizer.has_chat_template:
        what = "makes chats of prompts, and the model has no chat template"
        fix = "leave it out to have texts continued as they are, or give a model with a template"
        raise InputError([Problem("task.chat", what, fix)])
    read = _Reading(task, tokenizer, room)
    if task.held_out:
        train = read.part(task.train, "train", 0.0)
        held_out = read.part(task.held_out, "validation", 0.0)
    else:
        train = read.part(task.train, "train", task.validation)
        held_out = read.part(task.train, "validation", task.validation) if task.validation else []
    read.require()
    kept = {asked.token_ids for asked in held_out}
    left = [asked for asked in train if asked.token_ids not in kept]
    if not left:
        what = "holds no prompt to train on" + (" that is not held out as well" if train else "")
        raise InputError([Problem(task.train, what, "give more prompts, or hold fewer out")])
    notes = list(read.notes)
    if gone := len(train) - len(left):
        some = format_quantity(gone, "prompt")
        notes.append(f"{some} to train on stand among those held out, and are left out")
    return PromptSplits(tuple(left), tuple(held_out), tuple(notes))


class _Reading:
    """Reads records of one task, and gathers what is wrong with them."""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, room: int) -> None:
        self._task, self._words, self._room = task, tokenizer, room
        self._needs = any(
            isinstance(each, ExactReward | NumberReward) for each in task.question_rewards
        )
        self._numbers = any(isinstance(each, NumberReward) for each in task.question_rewards)
        self._tail: tuple[int, ...] | None = None
        self._problems: list[Problem] = []
        self._continued = self._dropped = 0

    def part(self, path: str, split: SplitName, validation: float) -> list[TaskPrompt]:
        """Return the prompts of a file that are of a split."""
        found = []
        for number, record in enumerate(read_records([path])):
            if not is_in_split(number, split, validation):
                continue
            try:
                asked = self._asked(record)
            except InputError as error:
                # Only what a template says of a chat has another place than the record's own.
                self._problems += [
                    each
                    if each.where.startswith(record.source)
                    else each._replace(where=f"{record.source}: {each.where}")
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
            some = format_quantity(self._dropped, "prompt")
            yield f"{some} of more than {self._room:,} tokens left out (task.length_policy = drop)"
        if self._continued and self._words.has_chat_template:
            some = format_quantity(self._continued, "prompt")
            what = "texts, which are continued without the model's chat template"
            yield f"{some} are {what}: task.chat=true asks them as messages of a user"

    def require(self) -> None:
        """Raise what is wrong, the first few records by name."""
        if len(self._problems) > _NAMED:
            more = f"{len(self._problems) - _NAMED:,} more are refused likewise"
            self._problems[_NAMED:] = [Problem(self._task.train, more, "mend them all")]
        if self._problems:
            raise InputError(self._problems)

    def _asked(self, record: DataRecord) -> TaskPrompt | None:
        """Return what a record asks; None where it is too long and may be left out."""
        where, values = record.source, map_fields(record, self._task.fields.map_fields)
        question = (
            parse_question(DataRecord(where, values)) if self._needs else _open(values, where)
        )
        if self._numbers and isinstance(question, ExactMatchQuestion):
            _require_number(question, where)
        prompt = self._prompt(question)
        tokens = encode_prompt(self._words, prompt, self._task.options)
        if not tokens:
            what = "has a prompt without tokens"
            raise InputError([Problem(where, what, "begin the prompt with some text")])
        if len(tokens) > self._room:
            if self._task.length_policy == "drop":
                self._dropped += 1
                return None
            what = f"has a prompt of {len(tokens):,} tokens, and there is room for {self._room:,}"
            more = "fewer max_tokens for answers"
            if self._room == self._task.max_prompt_tokens:
                more = "a higher task.max_prompt_tokens"
            fix = f"use task.length_policy=drop to leave such out, or {more}"
            raise InputError([Problem(where, what, fix)])
        return TaskPrompt(tokens, question, () if isinstance(prompt, str) else self._behind(prompt))

    def _prompt(self, question: Question | OpenQuestion) -> Prompt:
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
        if not self._words.has_chat_template:
            what = "is a chat, and the model has no chat template"
            fix = "give prompts as texts, or a model with a template"
            raise InputError([Problem(question.where, what, fix)])
        if task.system and prompt[0].get("role") != "system":
            prompt = [{"role": "system", "content": task.system}, *prompt]
        return prompt

    def _behind(self, prompt: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        if self._tail is None:
            self._tail = find_template_suffix(self._words, prompt, self._task.options)
        return self._tail


def find_template_suffix(
    tokenizer: Tokenizer, prompt: Sequence[dict[str, Any]], values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the tokens that a template writes behind the end of an answer, and no model draws.

    A reward model was trained on whole chats, and gives its reward at their last token.
    """
    chat = ChatExample((*prompt, {"role": "assistant", "content": "yes"}), template_kwargs=values)
    try:
        (example,) = encode_chat(tokenizer, chat, "last")
    except InputError:
        return ()  # a template that writes answers anew, on which none was trained either
    last = int(example.loss_mask.nonzero()[0][-1])
    return tuple(int(token) for token in example.token_ids[last + 1 :])


def map_fields(record: DataRecord, names: Mapping[str, str]) -> dict[str, Any]:
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
            raise InputError([Problem(record.source, what, fix)])
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


def _open(values: Mapping[str, Any], where: str) -> OpenQuestion:
    """Take a prompt alone; what stands there as its answer is not looked at."""
    prompt = values.get("prompt")
    if prompt is None:
        prompt = values.get("messages")
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = prompt[:-1] if prompt[-1].get("role") == "assistant" else prompt
    try:
        found = msgspec.convert({"prompt": prompt, "where": where}, OpenQuestion)
    except msgspec.ValidationError:
        what, fix = f"holds {_some(values)}, which is no prompt", "give prompt, or messages"
        raise InputError([Problem(where, what, fix)]) from None
    if not found.prompt:
        raise InputError([Problem(where, "has an empty prompt", "give it some text")])
    return found


def _some(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(values)[:8]) or "nothing"


def _require_number(question: ExactMatchQuestion, where: str) -> None:
    if not any(extract_final_number(each) is not None for each in question.answers):
        what = f"has the answer {question.answers[0][:60]!r}, which comes to no number"
        raise InputError([Problem(where, what, "use task.reward=exact, or mend it")])
