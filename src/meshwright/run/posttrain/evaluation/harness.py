"""`evaluate`: asks a model questions and judges its answers.

All questions of a kind go to the engine at once, which batches them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.evaluation.code_execution import (
    CodeRunner,
    CodeSubmission,
    SubprocessCodeRunner,
    extract_code,
)
from meshwright.run.posttrain.evaluation.exact_match import Normalization, matches_answer
from meshwright.run.posttrain.evaluation.multiple_choice import (
    build_choice_requests,
    compute_choice_likelihood,
    pick_choices,
)
from meshwright.run.posttrain.evaluation.prompts import PromptContinuation, encode_prompt
from meshwright.run.posttrain.evaluation.questions import (
    CodeQuestion,
    ExactMatchQuestion,
    MultipleChoiceQuestion,
    Question,
)
from meshwright.run.posttrain.evaluation.report import (
    EvaluationReport,
    QuestionResult,
    build_report,
)
from meshwright.run.serve.llm import GenerationOutput, InferenceModel
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
_NAMED = 8
"""Questions that are named where many cannot be asked."""


def evaluate(
    llm: InferenceModel,
    questions: Sequence[Question],
    *,
    sampling: SamplingParams = GREEDY,
    at: Sequence[int] = (),
    pattern: str = "",
    normalization: Normalization = "strip",
    runner: CodeRunner | None = None,
    adapter: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> EvaluationReport:
    """Ask questions and judge the answers.

    Args:
        llm: Who answers.
        questions: What is asked; kinds may be mixed.
        sampling: How answers are drawn, and how many (`n`).
        at: Also tell the chance that one of so many answers is right, for each number.
        pattern: Where in an answer the exact one is: its last match.
        normalization: Which differences do not count.
        runner: Who runs programs; else bounded processes of this machine.
        adapter: The LoRA adapter to answer with.
        values: Names that the template may ask for.
    """
    if any(not 1 <= count <= sampling.n for count in at):
        what = f"asks for {max(at)} answers of each question, {sampling.n} are drawn"
        raise InputError([Problem("at", what, "draw more: SamplingParams(n=…)")])
    given = dict(values or {})
    verdicts: dict[int, QuestionResult] = {}
    written = [
        (n, one) for n, one in enumerate(questions) if not isinstance(one, MultipleChoiceQuestion)
    ]
    asks = [
        Request(
            prompt_token_ids=encode_prompt(llm.tokenizer, one.prompt, given),
            sampling_params=sampling,
            lora_name=adapter,
        )
        for _, one in written
    ]
    for (_, one), ask in zip(written, asks, strict=True):
        if not ask.prompt_token_ids:
            what = "has a prompt without tokens"
            raise InputError([Problem(one.where, what, "begin the prompt with some text")])
    listed = [
        (n, one) for n, one in enumerate(questions) if isinstance(one, MultipleChoiceQuestion)
    ]
    choices = [build_choice_requests(llm.tokenizer, one, given, adapter) for _, one in listed]
    _check(llm, [
        *((one.where, ask) for (_, one), ask in zip(written, asks, strict=True)),
        *((one.where, ask) for (_, one), each in zip(listed, choices, strict=True)
          for ask, _ in each),
    ])  # fmt: skip
    answered = llm.run_requests(asks) if asks else []
    programs: list[tuple[int, CodeQuestion, GenerationOutput]] = []
    for (number, question), completion in zip(written, answered, strict=True):
        _check_answered(completion, question.where)
        if isinstance(question, CodeQuestion):
            programs.append((number, question, completion))
        else:
            verdicts[number] = _compared(question, completion, pattern, normalization)
    if programs:
        verdicts |= _run(programs, runner or SubprocessCodeRunner())
    verdicts |= _chosen(llm, listed, choices)
    return build_report([verdicts[number] for number in sorted(verdicts)], at)


def _compared(
    question: ExactMatchQuestion,
    completion: GenerationOutput,
    pattern: str,
    normalization: Normalization,
) -> QuestionResult:
    texts = tuple(choice.text for choice in completion.outputs)
    right = (
        matches_answer(one, question.answers, pattern=pattern, normalization=normalization)
        for one in texts
    )
    return QuestionResult(
        where=question.where,
        task="exact",
        right=tuple(right),
        answers=texts,
        num_truncated=_count_truncated(completion),
    )


def _run(
    programs: Sequence[tuple[int, CodeQuestion, GenerationOutput]], runner: CodeRunner
) -> dict[int, QuestionResult]:
    jobs = [
        (number, CodeSubmission(extract_code(choice.text, question.prefix), question.tests))
        for number, question, completion in programs
        for choice in completion.outputs
    ]
    judged = runner.run([job for _, job in jobs])
    found = {}
    for number, question, completion in programs:
        mine = [one for (owner, _), one in zip(jobs, judged, strict=True) if owner == number]
        found[number] = QuestionResult(
            where=question.where,
            task="code",
            right=tuple(one.passed for one in mine),
            answers=tuple(choice.text for choice in completion.outputs),
            reasons=tuple(one.reason for one in mine),
            num_truncated=_count_truncated(completion),
        )
    return found


def _chosen(
    llm: InferenceModel,
    mine: Sequence[tuple[int, MultipleChoiceQuestion]],
    asked: Sequence[Sequence[tuple[Request, PromptContinuation]]],
) -> dict[int, QuestionResult]:
    """Judge questions of multiple choice."""
    answers = iter(llm.run_requests([ask for each in asked for ask, _ in each]) if asked else [])
    found = {}
    for (number, question), each in zip(mine, asked, strict=True):
        likely = []
        for choice, (_, parts) in zip(question.choices, each, strict=True):
            completion = next(answers)
            _check_answered(completion, question.where)
            likely.append(compute_choice_likelihood(completion, parts, choice))
        picked = pick_choices(likely)
        found[number] = QuestionResult(
            where=question.where,
            task="choices",
            right=(picked["sum"] == question.right,),
            answers=(question.choices[picked["sum"]],),
            reasons=tuple(msgspec.json.encode(one._asdict()).decode() for one in likely),
            measures={name: place == question.right for name, place in picked.items()},
        )
    return found


def _check(llm: InferenceModel, asked: Sequence[tuple[str, Request]]) -> None:
    """Refuse what cannot be asked by its place in a file, before anything is answered."""
    found: dict[Problem, None] = {}
    for where, ask in asked:
        try:
            llm.validate_request(ask)
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


def _count_truncated(completion: GenerationOutput) -> int:
    return sum(choice.finish_reason == "length" for choice in completion.outputs)


def _check_answered(completion: GenerationOutput, where: str) -> None:
    """Refuse to count what the engine could not answer as wrong."""
    failed = [
        one.finish_reason for one in completion.outputs if one.finish_reason in ("error", "abort")
    ]
    if failed:
        what = f"was not answered: the engine ended it ({failed[0]})"
        raise InputError([Problem(where, what, "look at the engine's own words")])
