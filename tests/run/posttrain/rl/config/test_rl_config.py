"""Settings that cannot run are refused, with what would."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.rl.config.presets import get_sorting_digits_preset
from meshwright.run.posttrain.rl.config.rl_config import (
    ObjectiveConfig,
    RLConfig,
    RLEvaluationConfig,
    TaskConfig,
    TinyModelConfig,
)
from meshwright.spec.file_formats import dump, dump_data
from meshwright.spec.serialization import decode, encode


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement": "disaggregated", "max_staleness": 2}, "means 0, not 2"),
        ({"placement": "one_step_off", "max_staleness": 0}, "means 1, not 0"),
        ({"placement": "beside"}, "beside"),
        ({"placement": "synchronous"}, "use disaggregated"),
        ({"rollout_only": True, "replay": "file"}, "nothing to draw"),
        ({"placement": "async", "replay": "file"}, "needs an engine"),
        (
            {"placement": "async", "evaluate": RLEvaluationConfig(every_steps=3)},
            "never idle",
        ),
        ({"group_size": 0}, "group_size"),
        (
            {"max_cudagraph_capture_size": 9000},
            "max_cudagraph_capture_size: 9,000 tokens are more than a step has, 8,192",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RLConfig(**given)


def test_parts_are_refused_by_themselves() -> None:
    with pytest.raises(InputError, match="sorting-digits"):
        TaskConfig(name="sorting-digit")
    with pytest.raises(InputError, match="divisor"):
        TinyModelConfig(hidden=64, heads=3)
    with pytest.raises(InputError, match="clip"):
        ObjectiveConfig(loss="reinforce", minibatches=2)


def test_a_file_gives_the_same_settings_again() -> None:
    settings = get_sorting_digits_preset(3, placement="async", max_staleness=4)
    assert decode(RLConfig, encode(settings)) == settings
    assert 'placement = "async"' in dump(settings)
    assert dump_data(encode(settings), ".toml") == dump(settings)
    assert settings.max_staleness_steps == 4
    assert RLConfig().max_staleness_steps == 0
