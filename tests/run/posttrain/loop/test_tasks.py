"""Faults of a task are told as those of the task, with what to do."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="tasks are loaded beside the loop")

from meshwright.errors import InputError
from meshwright.run.posttrain.loop.settings import TaskSettings
from meshwright.run.posttrain.loop.tasks import tasks_of
from tests.run.posttrain.loop.small import settings

HERE = "tests.run.posttrain.loop.environments"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"reward": "share"}}, r"options\.reward: sorting-digits takes no options"),
        ({"name": f"{HERE}:judged", "digits": 3}, r"task\.digits: is read by sorting-digits alone"),
        ({"name": f"{HERE}:judged", "options": {"bda": 1}}, "judged failed: TypeError"),
        ({"name": f"{HERE}:bare"}, "bare returns has no name, verifiers, waits, reset"),
        ({"name": f"{HERE}:breaks"}, r"breaks failed: ZeroDivisionError: .*environments\.py:\d+"),
        ({"name": "nowhere.tasks:own"}, "cannot be loaded: .*nowhere"),
    ],
)
def test_a_fault_of_a_task_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        tasks_of(settings(task=TaskSettings(**given)))
