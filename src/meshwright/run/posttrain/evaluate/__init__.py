"""Evaluation of what a model has learnt: exact answers, multiple choice, code that passes tests.

    llm = LLM("path/of/model")
    report = evaluate(llm, read_questions(["held-out.jsonl"]))
    print(report)

questions   what is asked, read from files
prompts     the same as tokens, through the template that serves
exact       answers compared as text
final       the number or the choice that an answer comes to
judge_text  the same in the processes of verifiers, for rewards
choices     answers by how likely the model thinks them
code        programs, run with their tests in bounded processes
report      shares with their intervals, and every verdict
harness     all of it over a model that answers
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.evaluate.code import CodeRunner, VerifiedCode
    from meshwright.run.posttrain.evaluate.harness import Answers, evaluate
    from meshwright.run.posttrain.evaluate.questions import (
        Choices,
        Code,
        Exact,
        Question,
        read_questions,
    )
    from meshwright.run.posttrain.evaluate.report import Report, Score, Verdict

_HERE = "meshwright.run.posttrain.evaluate"
_HOMES = {
    "Answers": f"{_HERE}.harness",
    "Choices": f"{_HERE}.questions",
    "Code": f"{_HERE}.questions",
    "CodeRunner": f"{_HERE}.code",
    "Exact": f"{_HERE}.questions",
    "Question": f"{_HERE}.questions",
    "Report": f"{_HERE}.report",
    "Score": f"{_HERE}.report",
    "Verdict": f"{_HERE}.report",
    "VerifiedCode": f"{_HERE}.code",
    "evaluate": f"{_HERE}.harness",
    "read_questions": f"{_HERE}.questions",
}

__all__ = [
    "Answers",
    "Choices",
    "Code",
    "CodeRunner",
    "Exact",
    "Question",
    "Report",
    "Score",
    "Verdict",
    "VerifiedCode",
    "evaluate",
    "read_questions",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
