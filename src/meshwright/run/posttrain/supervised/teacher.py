"""What a teacher wrote, with the words it thought likely at each place: recorded, read again.

    {"prompt": [5, 9], "tokens": [17, 2], "words": [[17, 4], [2, 8]], "logprobs": [[-0.1, …], …]}

`words[i]` are the likeliest words at the place of `tokens[i]`, `logprobs[i]` what the teacher gave
them: of the whole vocabulary, at temperature 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import Example
from meshwright.run.posttrain.data.prepared import Prepared, TooLong, gather, is_of
from meshwright.run.posttrain.data.records import Record, read_records
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import Completion
from meshwright.run.serve.model.words import Words
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.data.selection import Split

MOST_WORDS = 20
"""The engine tells no more of them."""
_FIX = "let a teacher answer first: mw generate TEACHER --file PROMPTS --record told.jsonl"


class Answers(Protocol):
    """A model that answers: `LLM` is one."""

    def answer(self, asks: Sequence[Ask]) -> list[Completion]:
        """Answer asks, all at once."""


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of a teacher."""

    prompt: list[int]
    tokens: list[int]
    words: list[list[int]]
    logprobs: list[list[float]]


class TeacherSet(NamedTuple):
    """Answers as examples, with what the teacher thought at every token."""

    prepared: Prepared
    words: NDArray[np.int64]
    """Likely words of every token of `prepared`, [N, K]; 0 where fewer are known."""
    logprobs: NDArray[np.float32]
    """What the teacher gave them; -inf where fewer are known, and where nothing is trained."""


def record(
    llm: Answers,
    prompts: Sequence[Sequence[int]],
    path: str | Path,
    *,
    words: int = MOST_WORDS,
    sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
) -> int:
    """Let a teacher answer prompts, and write down what it thought; return how many answers.

    What is told are log-probabilities before temperature and cuts, however answers are drawn.
    """
    asked = msgspec.structs.replace(sampling, logprobs=words)
    found = llm.answer([Ask(prompt=tuple(prompt), sampling=asked) for prompt in prompts])
    lines = [
        msgspec.json.encode(
            Told(
                prompt=list(each.prompt),
                tokens=list(choice.tokens),
                words=[[word for word, _ in told.top] for told in choice.logprobs],
                logprobs=[[logprob for _, logprob in told.top] for told in choice.logprobs],
            )
        )
        for each in found
        for choice in each.choices
        if choice.tokens
    ]
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def prompts_of(words: Words, sources: Sequence[str | Path]) -> list[tuple[int, ...]]:
    """Return the prompts of records as tokens: texts, or chats up to their last answer."""
    found = []
    for one in read_records(sources):
        prompt = one.values.get("prompt")
        messages = one.values.get("messages") if prompt is None else prompt
        if isinstance(prompt, str):
            found.append(tuple(words.encode(prompt)))
            continue
        if not isinstance(messages, list) or not messages:
            what, fix = "has no prompt", "give a prompt, or messages"
            raise InputError([Problem(one.where, what, fix)])
        if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        text = words.chat(messages, add_generation_prompt=True)
        found.append(tuple(words.encode(text, special=False)))
    return found


def read_teacher(
    sources: Sequence[str | Path],
    *,
    length: int,
    too_long: TooLong = "cut",
    split: Split = "train",
    validation: float = 0.0,
    padding: int = 0,
) -> TeacherSet:
    """Read recorded answers of one split, fitted to a length."""
    told: dict[str, Told] = {}

    def units() -> Iterator[tuple[str, Example]]:
        for number, one in enumerate(read_records(sources)):
            if is_of(number, split, validation):
                told[one.where] = found = _told(one)
                tokens = np.array([*found.prompt, *found.tokens], np.int32)
                trained = np.arange(len(tokens)) >= len(found.prompt)
                yield one.where, Example(tokens, trained)

    prepared = gather(units(), length=length, too_long=too_long, padding=padding)
    return _with_words(prepared, told)


def _with_words(prepared: Prepared, told: dict[str, Told]) -> TeacherSet:
    most = max(len(row) for where in prepared.records for row in told[where].words)
    words = np.zeros((len(prepared.tokens), most), np.int64)
    logprobs = np.full(words.shape, -np.inf, np.float32)
    for number, where in enumerate(prepared.records):
        found = told[where]
        first = int(prepared.starts[number]) + len(found.prompt)
        room = int(prepared.starts[number + 1]) - first  # what was cut off has no place
        for place in range(min(room, len(found.tokens))):
            known = len(found.words[place])
            words[first + place, :known] = found.words[place]
            logprobs[first + place, :known] = found.logprobs[place]
    name = fingerprint(prepared.fingerprint, words.tobytes(), logprobs.tobytes())
    return TeacherSet(replace(prepared, fingerprint=name), words, logprobs)


def _told(one: Record) -> Told:
    try:
        found = msgspec.convert(one.values, Told)
    except msgspec.ValidationError as error:
        chats = [name for name in ("messages", "completion", "chosen") if name in one.values]
        why = f"it holds {chats[0]}" if chats else str(error)
        what = f"is no recorded answer of a teacher: {why}"
        raise InputError([Problem(one.where, what, _FIX)]) from None
    faults = list(_faults(found))
    if faults:
        raise InputError([Problem(one.where, what, _FIX) for what in faults])
    return found


def _faults(found: Told) -> Iterable[str]:
    places = (len(found.tokens), len(found.words), len(found.logprobs))
    if not found.prompt or not found.tokens:
        yield "has no prompt, or no answer"
    elif len(set(places)) > 1:
        yield f"has {places[0]} tokens, words for {places[1]} and log-probabilities for {places[2]}"
    else:
        for place, (words, logprobs) in enumerate(zip(found.words, found.logprobs, strict=True), 1):
            fault = _fault(words, logprobs)
            if fault:
                yield f"token {place} {fault}"
                return


def _fault(words: Sequence[int], logprobs: Sequence[Any]) -> str:
    if len(words) != len(logprobs) or not words:
        return f"has {len(words)} words and {len(logprobs)} log-probabilities"
    if len(set(words)) < len(words):
        return "names a word twice"
    mass = float(np.exp(np.array(logprobs)).sum())
    if not mass <= 1.001 or max(logprobs) > 0:
        return f"has log-probabilities of {mass:.3f} altogether, and 1 is all there is"
    return ""
