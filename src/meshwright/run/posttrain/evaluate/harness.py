"""`evaluate`: asks a model questions and judges its answers.

All questions of a kind go to the engine at once, which batches them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.evaluate.choices import asks_of, chosen, likelihood
from meshwright.run.posttrain.evaluate.code import CodeRunner, Program, VerifiedCode, program_of
from meshwright.run.posttrain.evaluate.exact import Normal, is_right
from meshwright.run.posttrain.evaluate.prompts import Continued, tokens_of
from meshwright.run.posttrain.evaluate.questions import Choices, Code, Exact, Question
from meshwright.run.posttrain.evaluate.report import Report, Verdict, report_of
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import Completion
from meshwright.run.serve.model.words import Words

GREEDY = Sampling(temperature=0.0, max_tokens=256)
_NAMED = 8
"""Questions that are named where many cannot be asked."""


class Answers(Protocol):
    """A model that answers: `LLM` is one."""

    @property
    def words(self) -> Words:
        """Its tokenizer and template."""

    def check(self, ask: Ask) -> None:
        """Raise `InputError` where an ask cannot be answered at all."""

    def answer(self, asks: Sequence[Ask]) -> list[Completion]:
        """Answer asks, all at once."""


def evaluate(
    llm: Answers,
    questions: Sequence[Question],
    *,
    sampling: Sampling = GREEDY,
    at: Sequence[int] = (),
    pattern: str = "",
    normal: Normal = "strip",
    runner: CodeRunner | None = None,
    adapter: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> Report:
    """Ask questions and judge the answers.

    Args:
        llm: Who answers.
        questions: What is asked; kinds may be mixed.
        sampling: How answers are drawn, and how many (`n`).
        at: Also tell the chance that one of so many answers is right, for each number.
        pattern: Where in an answer the exact one is: its last match.
        normal: Which differences do not count.
        runner: Who runs programs; else bounded processes of this machine.
        adapter: The LoRA adapter to answer with.
        values: Names that the template may ask for.
    """
    if any(not 1 <= count <= sampling.n for count in at):
        what = f"asks for {max(at)} answers of each question, {sampling.n} are drawn"
        raise InputError([Problem("at", what, "draw more: Sampling(n=…)")])
    given = dict(values or {})
    verdicts: dict[int, Verdict] = {}
    written = [(n, one) for n, one in enumerate(questions) if not isinstance(one, Choices)]
    asks = [
        Ask(prompt=tokens_of(llm.words, one.prompt, given), sampling=sampling, adapter=adapter)
        for _, one in written
    ]
    for (_, one), ask in zip(written, asks, strict=True):
        if not ask.prompt:
            what = "has a prompt without tokens"
            raise InputError([Problem(one.where, what, "begin the prompt with some text")])
    listed = [(n, one) for n, one in enumerate(questions) if isinstance(one, Choices)]
    choices = [asks_of(llm.words, one, given, adapter) for _, one in listed]
    _check(llm, [
        *((one.where, ask) for (_, one), ask in zip(written, asks, strict=True)),
        *((one.where, ask) for (_, one), each in zip(listed, choices, strict=True)
          for ask, _ in each),
    ])  # fmt: skip
    answered = llm.answer(asks) if asks else []
    programs: list[tuple[int, Code, Completion]] = []
    for (number, question), completion in zip(written, answered, strict=True):
        _check_answered(completion, question.where)
        if isinstance(question, Code):
            programs.append((number, question, completion))
        else:
            verdicts[number] = _compared(question, completion, pattern, normal)
    if programs:
        verdicts |= _run(programs, runner or VerifiedCode())
    verdicts |= _chosen(llm, listed, choices)
    return report_of([verdicts[number] for number in sorted(verdicts)], at)


def _compared(question: Exact, completion: Completion, pattern: str, normal: Normal) -> Verdict:
    texts = tuple(choice.text for choice in completion.choices)
    right = (is_right(one, question.answers, pattern=pattern, normal=normal) for one in texts)
    return Verdict(
        where=question.where, task="exact", right=tuple(right), answers=texts, cut=_cut(completion)
    )


def _run(
    programs: Sequence[tuple[int, Code, Completion]], runner: CodeRunner
) -> dict[int, Verdict]:
    jobs = [
        (number, Program(program_of(choice.text, question.prefix), question.tests))
        for number, question, completion in programs
        for choice in completion.choices
    ]
    judged = runner.run([job for _, job in jobs])
    found = {}
    for number, question, completion in programs:
        mine = [one for (owner, _), one in zip(jobs, judged, strict=True) if owner == number]
        found[number] = Verdict(
            where=question.where,
            task="code",
            right=tuple(one.passed for one in mine),
            answers=tuple(choice.text for choice in completion.choices),
            reasons=tuple(one.reason for one in mine),
            cut=_cut(completion),
        )
    return found


def _chosen(
    llm: Answers,
    mine: Sequence[tuple[int, Choices]],
    asked: Sequence[Sequence[tuple[Ask, Continued]]],
) -> dict[int, Verdict]:
    """Judge questions of multiple choice."""
    answers = iter(llm.answer([ask for each in asked for ask, _ in each]) if asked else [])
    found = {}
    for (number, question), each in zip(mine, asked, strict=True):
        likely = []
        for choice, (_, parts) in zip(question.choices, each, strict=True):
            completion = next(answers)
            _check_answered(completion, question.where)
            likely.append(likelihood(completion, parts, choice))
        picked = chosen(likely)
        found[number] = Verdict(
            where=question.where,
            task="choices",
            right=(picked["sum"] == question.right,),
            answers=(question.choices[picked["sum"]],),
            reasons=tuple(msgspec.json.encode(one._asdict()).decode() for one in likely),
            measures={name: place == question.right for name, place in picked.items()},
        )
    return found


def _check(llm: Answers, asked: Sequence[tuple[str, Ask]]) -> None:
    """Refuse what cannot be asked by its place in a file, before anything is answered."""
    found: dict[Problem, None] = {}
    for where, ask in asked:
        try:
            llm.check(ask)
        except InputError as error:
            for one in error.problems:
                its_own = one.where == "prompt" and where
                found[one._replace(where=where) if its_own else one] = None
    problems = list(found)
    if len(problems) > _NAMED:
        more = f"{len(problems) - _NAMED:,} more are refused likewise"
        problems[_NAMED:] = [Problem("questions", more, "mend them all")]
    if problems:
        raise InputError(problems)


def _cut(completion: Completion) -> int:
    return sum(choice.finish == "length" for choice in completion.choices)


def _check_answered(completion: Completion, where: str) -> None:
    """Refuse to count what the engine could not answer as wrong."""
    failed = [one.finish for one in completion.choices if one.finish in ("error", "cancelled")]
    if failed:
        what = f"was not answered: the engine ended it ({failed[0]})"
        raise InputError([Problem(where, what, "look at the engine's own words")])
