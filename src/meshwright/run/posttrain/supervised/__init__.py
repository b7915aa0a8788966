"""Supervised recipes on the trainer: answers, preferences, rewards, a teacher's thoughts.

ask_recipe, read_recipe   a recipe's job from its file, a model's path or plain data
RecipeJob                 a training job with `[recipe]`, `[chats]` and `[adapter]`
open_recipe               reads and prepares its data: a task for `meshwright.run.train.train`
export_recipe             what a run learnt, as an adapter or as a whole model
RewardModel               gives rewards
record                    writes down what a teacher answers, to be distilled
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.supervised.export import export_recipe
    from meshwright.run.posttrain.supervised.job import RecipeJob
    from meshwright.run.posttrain.supervised.job_file import ask_recipe, read_recipe
    from meshwright.run.posttrain.supervised.reward import RewardModel
    from meshwright.run.posttrain.supervised.task import RecipeTask, open_recipe
    from meshwright.run.posttrain.supervised.teacher import record

_HERE = "meshwright.run.posttrain.supervised"
_HOMES = {
    "RecipeJob": f"{_HERE}.job",
    "RecipeTask": f"{_HERE}.task",
    "RewardModel": f"{_HERE}.reward",
    "ask_recipe": f"{_HERE}.job_file",
    "export_recipe": f"{_HERE}.export",
    "open_recipe": f"{_HERE}.task",
    "read_recipe": f"{_HERE}.job_file",
    "record": f"{_HERE}.teacher",
}

__all__ = [
    "RecipeJob",
    "RecipeTask",
    "RewardModel",
    "ask_recipe",
    "export_recipe",
    "open_recipe",
    "read_recipe",
    "record",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
