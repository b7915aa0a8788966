"""Supervised recipes on the trainer: answers, preferences, rewards, a teacher's thoughts.

load_recipe, parse_recipe   a recipe's job from its file, a model's path or plain data
RecipeJob                   a training job with `[recipe]`, `[chats]` and `[adapter]`
open_recipe                 reads and prepares its data: a task for `meshwright.run.train.train`
export_recipe               what a run learnt, as an adapter or as a whole model
RewardModel                 gives rewards
record_teacher_completions  writes down what a teacher answers, to be distilled
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.supervised.recipe_export import export_recipe
    from meshwright.run.posttrain.supervised.recipe_file import load_recipe, parse_recipe
    from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
    from meshwright.run.posttrain.supervised.recipe_task import RecipeTask, open_recipe
    from meshwright.run.posttrain.supervised.reward_model import RewardModel
    from meshwright.run.posttrain.supervised.teacher_logprobs import record_teacher_completions

_HERE = "meshwright.run.posttrain.supervised"
_MODULES = {
    "RecipeJob": "meshwright.run.posttrain.supervised.recipe_job",
    "RecipeTask": "meshwright.run.posttrain.supervised.recipe_task",
    "RewardModel": "meshwright.run.posttrain.supervised.reward_model",
    "load_recipe": "meshwright.run.posttrain.supervised.recipe_file",
    "export_recipe": "meshwright.run.posttrain.supervised.recipe_export",
    "open_recipe": "meshwright.run.posttrain.supervised.recipe_task",
    "parse_recipe": "meshwright.run.posttrain.supervised.recipe_file",
    "record_teacher_completions": "meshwright.run.posttrain.supervised.teacher_logprobs",
}

__all__ = [
    "RecipeJob",
    "RecipeTask",
    "RewardModel",
    "export_recipe",
    "load_recipe",
    "open_recipe",
    "parse_recipe",
    "record_teacher_completions",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
