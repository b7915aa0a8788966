"""Odd configs: a clear refusal or a model that can be written back, never another exception."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.model import count_flops, count_parameters
from meshwright.spec.model.huggingface import list_model_types, read_config, write_config

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "configs.json").read_text(encoding="utf-8")
)
KEYS = sorted({key for config in CONFIGS.values() for key in config})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 300)
    | st.sampled_from([0, -1, 1, 10**30, 10**400, 2**63, -(10**18)])
    | st.floats()
    | st.sampled_from(["", "silu", "4096", "yarn", "linear", "sliding_attention", "M*E-", "\x00"])
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=8,
)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32, 40, 64, 96, 128, 256, 512, 1000, 4096])


def _tables(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(item for item in config.values() if isinstance(item, dict))]


def _holds(config: dict[str, Any]) -> None:
    """Whatever reads can be counted, written, and read back as the same model.

    Whatever does not is refused with the place of each fault and a way to mend it.
    """
    try:
        model = read_config(config, "fuzzed")
    except InputError as refusal:
        incomplete = [
            problem for problem in refusal.problems if not (problem.where and problem.fix)
        ]
    else:
        incomplete = []
        assert count_parameters(model).total > 0
        assert count_flops(model, 7).forward > 0
        assert read_config(write_config(model), "fuzzed") == model
    assert incomplete == []


@given(st.data())
def test_config_with_odd_values_is_read_or_refused(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(list(CONFIGS.values()))))
    for _ in range(data.draw(st.integers(1, 4))):
        table = data.draw(st.sampled_from(_tables(config)))
        key = data.draw(st.sampled_from([*table, *KEYS]))
        table[key] = data.draw(values)
    _holds(config)


@given(st.data())
@settings(max_examples=300)
def test_variant_of_any_family_can_be_written_back(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(list(CONFIGS.values()))))
    for table in _tables(config):
        for key, value in table.items():
            if type(value) is int and data.draw(st.integers(0, 3)) == 0:
                table[key] = data.draw(sizes)
            elif type(value) is bool and data.draw(st.integers(0, 3)) == 0:
                table[key] = not value
            elif key == "layer_types":
                table[key] = None
    _holds(config)


@given(
    st.sampled_from(list_model_types()), st.dictionaries(st.sampled_from(KEYS), values, max_size=8)
)
def test_random_keys_are_read_or_refused(family: str, keys: dict[str, Any]) -> None:
    _holds({"hidden_size": 256, **keys, "model_type": family})


@given(st.dictionaries(st.text(max_size=12) | st.just("model_type"), values, max_size=4))
def test_random_data_is_refused(data: dict[str, Any]) -> None:
    _holds(data)
