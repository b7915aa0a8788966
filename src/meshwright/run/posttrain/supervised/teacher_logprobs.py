"""What a teacher wrote, with the words it thought likely at each place: recorded, read again.

    {"prompt": [5, 9], "tokens": [17, 2], "words": [[17, 4], [2, 8]], "logprobs": [[-0.1, …], …]}

`words[i]` are the likeliest words at the place of `tokens[i]`, `logprobs[i]` what the teacher gave
them: of the whole vocabulary, at temperature 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import TokenizedExample
from meshwright.run.posttrain.data.prepared_dataset import (
    LengthPolicy,
    PreparedDataset,
    collect_examples,
    is_in_split,
)
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.serve.llm import RequestRunner
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.run.train.data.document_split import SplitName
from meshwright.run.train.data.fingerprint import compute_fingerprint

MAX_TOP_K = 20
"""The engine tells no more of them."""
_FIX = (
    "let a teacher answer first: mw generate TEACHER --input-file PROMPTS --output-file told.jsonl"
)


class TeacherCompletion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of a teacher."""

    prompt: list[int]
    tokens: list[int]
    words: list[list[int]]
    logprobs: list[list[float]]


class TeacherDataset(NamedTuple):
    """Answers as examples, with what the teacher thought at every token."""

    dataset: PreparedDataset
    top_token_ids: NDArray[np.int64]
    """Likely words of every token of `prepared`, [N, K]; 0 where fewer are known."""
    top_logprobs: NDArray[np.float32]
    """What the teacher gave them; -inf where fewer are known, and where nothing is trained."""


def record_teacher_completions(
    llm: RequestRunner,
    prompts: Sequence[Sequence[int]],
    path: str | Path,
    *,
    top_k: int = MAX_TOP_K,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - a frozen value
) -> int:
    """Let a teacher answer prompts, and write down what it thought; return how many answers.

    What is told are log-probabilities before temperature and cuts, however answers are drawn.
    """
    asked = msgspec.structs.replace(sampling, logprobs=top_k)
    found = llm.run_requests(
        [Request(prompt_token_ids=tuple(prompt), sampling_params=asked) for prompt in prompts]
    )
    lines = [
        msgspec.json.encode(
            TeacherCompletion(
                prompt=list(each.prompt_token_ids),
                tokens=list(choice.token_ids),
                words=[[word for word, _ in told.top_logprobs] for told in choice.logprobs],
                logprobs=[
                    [logprob for _, logprob in told.top_logprobs] for told in choice.logprobs
                ],
            )
        )
        for each in found
        for choice in each.outputs
        if choice.token_ids
    ]
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def encode_teacher_prompts(
    tokenizer: Tokenizer, sources: Sequence[str | Path]
) -> list[tuple[int, ...]]:
    """Return the prompts of records as tokens: texts, or chats up to their last answer."""
    found = []
    for one in read_records(sources):
        prompt = one.values.get("prompt")
        messages = one.values.get("messages") if prompt is None else prompt
        if isinstance(prompt, str):
            found.append(tuple(tokenizer.encode(prompt)))
            continue
        if not isinstance(messages, list) or not messages:
            what, fix = "has no prompt", "give a prompt, or messages"
            raise InputError([Problem(one.source, what, fix)])
        if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        found.append(tuple(tokenizer.encode(text, special=False)))
    return found


def read_teacher_dataset(
    sources: Sequence[str | Path],
    *,
    length: int,
    length_policy: LengthPolicy = "truncate",
    split: SplitName = "train",
    validation: float = 0.0,
    padding: int = 0,
) -> TeacherDataset:
    """Read recorded answers of one split, fitted to a length."""
    told: dict[str, TeacherCompletion] = {}

    def units() -> Iterator[tuple[str, TokenizedExample]]:
        for number, one in enumerate(read_records(sources)):
            if is_in_split(number, split, validation):
                told[one.source] = found = _told(one)
                tokens = np.array([*found.prompt, *found.tokens], np.int32)
                trained = np.arange(len(tokens)) >= len(found.prompt)
                yield one.source, TokenizedExample(tokens, trained)

    prepared = collect_examples(
        units(), length=length, length_policy=length_policy, padding=padding
    )
    return _with_words(prepared, told)


def _with_words(prepared: PreparedDataset, told: dict[str, TeacherCompletion]) -> TeacherDataset:
    most = max(len(row) for where in prepared.sources for row in told[where].words)
    words = np.zeros((len(prepared.tokens), most), np.int64)
    logprobs = np.full(words.shape, -np.inf, np.float32)
    for number, where in enumerate(prepared.sources):
        found = told[where]
        first = int(prepared.example_starts[number]) + len(found.prompt)
        room = int(prepared.example_starts[number + 1]) - first  # what was cut off has no place
        for place in range(min(room, len(found.tokens))):
            known = len(found.words[place])
            words[first + place, :known] = found.words[place]
            logprobs[first + place, :known] = found.logprobs[place]
    name = compute_fingerprint(prepared.fingerprint, words.tobytes(), logprobs.tobytes())
    return TeacherDataset(replace(prepared, fingerprint=name), words, logprobs)


def _told(one: DataRecord) -> TeacherCompletion:
    try:
        found = msgspec.convert(one.values, TeacherCompletion)
    except msgspec.ValidationError as error:
        chats = [name for name in ("messages", "completion", "chosen") if name in one.values]
        why = f"it holds {chats[0]}" if chats else str(error)
        what = f"is no recorded answer of a teacher: {why}"
        raise InputError([Problem(one.source, what, _FIX)]) from None
    faults = list(_faults(found))
    if faults:
        raise InputError([Problem(one.source, what, _FIX) for what in faults])
    return found


def _faults(found: TeacherCompletion) -> Iterable[str]:
    places = (len(found.tokens), len(found.words), len(found.logprobs))
    if not found.prompt or not found.tokens:
        yield "has no prompt, or no completion"
    elif len(set(places)) > 1:
        yield f"has {places[0]} tokens, top tokens for {places[1]} and logprobs for {places[2]}"
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
        return "lists a token twice"
    mass = float(np.exp(np.array(logprobs)).sum())
    if not mass <= 1.001 or max(logprobs) > 0:
        return f"has log-probabilities of {mass:.3f} altogether, and 1 is all there is"
    return ""
