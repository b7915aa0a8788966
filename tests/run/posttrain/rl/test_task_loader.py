"""Faults of a task are told as those of the task, with what to do."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="tasks are loaded beside the loop")

from meshwright.errors import InputError
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig
from meshwright.run.posttrain.rl.task_loader import load_task
from tests.run.posttrain.rl.small import settings

HERE = "tests.run.posttrain.rl.environments"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"reward": "share"}}, r"options\.reward: sorting-digits takes no options"),
        ({"name": f"{HERE}:judged", "digits": 3}, r"task\.digits: is read by sorting-digits alone"),
        ({"name": f"{HERE}:judged", "options": {"bda": 1}}, "judged failed: TypeError"),
        ({"name": f"{HERE}:bare"}, "bare returns has no name, verifiers, may_block, reset"),
        ({"name": f"{HERE}:breaks"}, r"breaks failed: ZeroDivisionError: .*environments\.py:\d+"),
        ({"name": "nowhere.tasks:own"}, "cannot be loaded: .*nowhere"),
    ],
)
def test_a_fault_of_a_task_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_task(settings(task=TaskConfig(**given)))
