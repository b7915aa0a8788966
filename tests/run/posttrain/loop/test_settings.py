"""Settings that cannot run are refused, with what would."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.loop.presets import sorting_digits
from meshwright.run.posttrain.loop.settings import (
    EvaluateSettings,
    LoopSettings,
    NetworkSettings,
    ObjectiveSettings,
    TaskSettings,
)
from meshwright.spec.files import dump, dump_data
from meshwright.spec.read import plain, read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement": "disaggregated", "max_staleness": 2}, "means 0, not 2"),
        ({"placement": "one-step-off", "max_staleness": 0}, "means 1, not 0"),
        ({"placement": "beside"}, "beside"),
        ({"placement": "synchronous"}, "use disaggregated"),
        ({"rollout_only": True, "replay": "file"}, "nothing to draw"),
        ({"placement": "asynchronous", "replay": "file"}, "needs an engine"),
        (
            {"placement": "asynchronous", "evaluate": EvaluateSettings(every_steps=3)},
            "never idle",
        ),
        ({"samples": 0}, "samples"),
        ({"graph_tokens": 9000}, "graph_tokens: 9,000 tokens are more than a step has, 8,192"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        LoopSettings(**given)


def test_parts_are_refused_by_themselves() -> None:
    with pytest.raises(InputError, match="sorting-digits"):
        TaskSettings(name="sorting-digit")
    with pytest.raises(InputError, match="divisor"):
        NetworkSettings(hidden=64, heads=3)
    with pytest.raises(InputError, match="clip"):
        ObjectiveSettings(loss="reinforce", minibatches=2)


def test_a_file_gives_the_same_settings_again() -> None:
    settings = sorting_digits(3, placement="asynchronous", max_staleness=4)
    assert read(LoopSettings, plain(settings)) == settings
    assert 'placement = "asynchronous"' in dump(settings)
    assert dump_data(plain(settings), ".toml") == dump(settings)
    assert settings.staleness == 4
    assert LoopSettings().staleness == 0
