"""Finds the best layout for a model on a cluster, proves it, and says why it wins."""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.predict.plan.answer import Answer, Plan, find_plans
    from meshwright.predict.plan.question import Question, Space, read_fixed

_HOMES = {
    "Answer": "meshwright.predict.plan.answer",
    "Plan": "meshwright.predict.plan.answer",
    "Question": "meshwright.predict.plan.question",
    "Space": "meshwright.predict.plan.question",
    "find_plans": "meshwright.predict.plan.answer",
    "read_fixed": "meshwright.predict.plan.question",
}

__all__ = ["Answer", "Plan", "Question", "Space", "find_plans", "read_fixed"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
