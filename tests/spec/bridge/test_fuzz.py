"""Whatever is given to a bridge, it answers with a value or with one `InputError`."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.bridge import BRIDGES
from meshwright.spec.bridge.deepspeed.ds_config_keys import KEYS as DEEPSPEED_KEYS
from meshwright.spec.bridge.framework_config import unflatten
from meshwright.spec.bridge.fsdp2.accelerate import KEYS as ACCELERATE_KEYS
from meshwright.spec.bridge.fsdp2.fully_shard_config import KEYS as FSDP2_KEYS
from meshwright.spec.bridge.megatron.flags import FLAGS
from meshwright.spec.bridge.nemo.legacy_config import RENAMED
from meshwright.spec.bridge.nemo.recipe_fields import PATHS
from meshwright.spec.bridge.torchtitan.job_keys import KEYS as TORCHTITAN_KEYS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import MoESpec, build_decoder_model

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 12)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full", "block", "4", "cpu", "auto", "rope", "yarn", "M*-", "([0]*2+[1]*2)",
                       "Et*2|t*2L", "selective", "op", "bf16", "learnable", "gated_delta_net"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
)
KEYS = {
    "nemo": sorted({*PATHS.values(), *RENAMED, "trainer.precision", "model.optim.name"}),
    "torchtitan": sorted(TORCHTITAN_KEYS),
    "deepspeed": sorted(DEEPSPEED_KEYS),
    "fsdp2": sorted({*ACCELERATE_KEYS, *FSDP2_KEYS}),
    "megatron": sorted(flag.name for flag in FLAGS),
}


def answers(name: str, given_: Any, gpus: int | None = None) -> None:
    """Only an `InputError` that says what to do may stand in for a layout."""
    try:
        answer: Any = BRIDGES[name].import_config(given_, gpus=gpus).layout
    except InputError as error:
        answer = error
    assert isinstance(answer, Layout) or answer.problems
    for problem in getattr(answer, "problems", ()):
        assert problem.what, problem
        assert problem.fix, problem


@pytest.mark.parametrize("name", BRIDGES)
@given(text=st.text(max_size=200), gpus=st.none() | st.integers(-3, 100))
@settings(deadline=None, max_examples=100)
def test_any_text_is_answered(name: str, text: str, gpus: int | None) -> None:
    answers(name, text, gpus)


@pytest.mark.parametrize("name", BRIDGES)
@given(data=st.data(), gpus=st.none() | st.integers(1, 64))
@settings(deadline=None, max_examples=120)
def test_any_values_of_known_keys_are_answered(
    name: str, data: st.DataObject, gpus: int | None
) -> None:
    keys = data.draw(st.lists(st.sampled_from(KEYS[name]), max_size=12, unique=True))
    answers(name, {key: data.draw(VALUES) for key in keys}, gpus)


@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_any_flags_with_any_words_are_answered(data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.sampled_from(KEYS["megatron"]), max_size=12))
    words = [[flag, *data.draw(st.lists(SCALARS.map(str), max_size=2))] for flag in flags]
    answers("megatron", " ".join(word for part in words for word in part))


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_json_of_known_keys_is_answered(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(KEYS["deepspeed"]), max_size=8, unique=True))
    flat = {key: data.draw(SCALARS) for key in keys if key != "zero_optimization"}
    answers("deepspeed", json.dumps(unflatten(flat)))


@pytest.mark.parametrize("name", BRIDGES)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_spoiled_export_is_answered(name: str, data: st.DataObject) -> None:
    layout = Layout(tp=2, sequence_parallel=True, pp=2, dp=4, zero=1, global_batch=16)
    experts = MoESpec(count=8, top_k=2, width=64)
    model = build_decoder_model(
        "m", layers=4, hidden=128, heads=4, ffn=256, vocab=512, experts=experts
    )
    text = BRIDGES[name].export_config(layout, model, sequence_length=128).text
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(text) - 1)))
        size = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.text(max_size=3)) + text[at + size :]
    answers(name, text, data.draw(st.sampled_from([None, 8, 16])))
