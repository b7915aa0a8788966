"""Finds the best layout for a model on a cluster, proves it, and says why it wins."""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.predict.plan.answer.plan_answer import Plan, PlanAnswer
    from meshwright.predict.plan.planner import find_plans
    from meshwright.predict.plan.question.layout_space import LayoutSpace, parse_fixed_fields
    from meshwright.predict.plan.question.plan_question import PlanQuestion

_MODULES = {
    "PlanAnswer": "meshwright.predict.plan.answer.plan_answer",
    "Plan": "meshwright.predict.plan.answer.plan_answer",
    "PlanQuestion": "meshwright.predict.plan.question.plan_question",
    "LayoutSpace": "meshwright.predict.plan.question.layout_space",
    "find_plans": "meshwright.predict.plan.planner",
    "parse_fixed_fields": "meshwright.predict.plan.question.layout_space",
}

__all__ = ["LayoutSpace", "Plan", "PlanAnswer", "PlanQuestion", "find_plans", "parse_fixed_fields"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
