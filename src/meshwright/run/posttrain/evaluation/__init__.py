"""Evaluation of what a model has learnt: exact answers, multiple choice, code that passes tests.

    llm = LLM("path/of/model")
    report = evaluate(llm, read_questions(["held-out.jsonl"]))
    print(report)

questions        what is asked, read from files
prompts          the same as tokens, through the template that serves
exact_match      answers compared as text
final_answer     the number or the choice that an answer comes to
verifiers        the same in the processes of verifiers, for rewards
multiple_choice  answers by how likely the model thinks them
code_execution   programs, run with their tests in bounded processes
report           shares with their intervals, and every verdict
harness          all of it over a model that answers
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.evaluation.code_execution import CodeRunner, SubprocessCodeRunner
    from meshwright.run.posttrain.evaluation.harness import evaluate
    from meshwright.run.posttrain.evaluation.questions import (
        CodeQuestion,
        ExactMatchQuestion,
        MultipleChoiceQuestion,
        Question,
        read_questions,
    )
    from meshwright.run.posttrain.evaluation.report import (
        AccuracyEstimate,
        EvaluationReport,
        QuestionResult,
    )

_HERE = "meshwright.run.posttrain.evaluation"
_MODULES = {
    "MultipleChoiceQuestion": "meshwright.run.posttrain.evaluation.questions",
    "CodeQuestion": "meshwright.run.posttrain.evaluation.questions",
    "CodeRunner": "meshwright.run.posttrain.evaluation.code_execution",
    "ExactMatchQuestion": "meshwright.run.posttrain.evaluation.questions",
    "Question": "meshwright.run.posttrain.evaluation.questions",
    "EvaluationReport": "meshwright.run.posttrain.evaluation.report",
    "AccuracyEstimate": "meshwright.run.posttrain.evaluation.report",
    "QuestionResult": "meshwright.run.posttrain.evaluation.report",
    "SubprocessCodeRunner": "meshwright.run.posttrain.evaluation.code_execution",
    "evaluate": "meshwright.run.posttrain.evaluation.harness",
    "read_questions": "meshwright.run.posttrain.evaluation.questions",
}

__all__ = [
    "AccuracyEstimate",
    "CodeQuestion",
    "CodeRunner",
    "EvaluationReport",
    "ExactMatchQuestion",
    "MultipleChoiceQuestion",
    "Question",
    "QuestionResult",
    "SubprocessCodeRunner",
    "evaluate",
    "read_questions",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
