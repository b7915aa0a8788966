"""A layout accepts what fits together and explains everything that does not."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.file_formats import dump, parse
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXIS_ORDERS, CHOICES, OFFLOADS, RECOMPUTE_OPS
from meshwright.spec.layout.field_rules import list_layout_problems
from meshwright.spec.serialization import decode, encode

DEGREES = st.integers(-1, 8)
SOME_LAYOUT: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "microbatch"), DEGREES),
        **dict.fromkeys(("shard", "expert_tp"), st.one_of(st.none(), DEGREES)),
        **{name: st.sampled_from(sorted(words)) for name, words in CHOICES.items()},
        "virtual_stages": st.integers(0, 3),
        "zero": st.integers(-1, 4),
        "sequence_parallel": st.booleans(),
        "global_batch": st.one_of(st.none(), st.integers(0, 64)),
        "stage_layers": st.one_of(st.none(), st.lists(st.integers(-1, 4), max_size=6).map(tuple)),
        "recompute_ops": st.lists(
            st.sampled_from([*sorted(RECOMPUTE_OPS), "nope"]), max_size=2
        ).map(tuple),
        "recompute_layers": st.one_of(st.none(), st.integers(-1, 4)),
        "offload_layers": st.one_of(st.none(), st.integers(-1, 4)),
        "offload": st.lists(st.sampled_from([*sorted(OFFLOADS), "disk"]), max_size=2).map(tuple),
        "order": st.sampled_from([*sorted(AXIS_ORDERS)[:3], "tp-pp"]),
    },
)


def problems_of(**values: Any) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        Layout(**values)
    return {problem.where: str(problem) for problem in caught.value.problems}


def test_defaults_are_one_gpu() -> None:
    assert Layout().gpus == 1


def test_gpus_is_the_product_of_the_degrees() -> None:
    assert Layout(tp=8, cp=2, pp=4, dp=3).gpus == 192


def test_expert_replicas_share_the_gpus_of_a_stage() -> None:
    layout = Layout(tp=2, cp=1, dp=16, ep=8, expert_tp=1)
    assert layout.expert_dp == 4


def test_expert_tensor_parallel_defaults_to_tp() -> None:
    assert Layout(tp=4, dp=8, ep=2).effective_expert_tp == 4


@given(SOME_LAYOUT)
def test_the_fast_test_and_the_explanation_agree(values: dict[str, Any]) -> None:
    layout = Layout()
    refused: InputError | None = None
    try:
        layout = Layout(**values)
    except InputError as error:
        refused = error
    assert list_layout_problems(layout) == []
    assert refused is None or all(p.where and p.fix for p in refused.problems)
    assert refused is None or refused.problems, "a refusal must say why"


@given(SOME_LAYOUT)
def test_files_give_back_the_same_layout(values: dict[str, Any]) -> None:
    try:
        layout = Layout(**values)
    except InputError:
        return
    for ending in (".toml", ".json", ".yaml"):
        assert decode(Layout, parse(dump(layout, ending), ending, "here")) == layout


@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=5)))
def test_any_table_is_read_or_refused_with_reasons(data: dict[str, Any]) -> None:
    refused: InputError | None = None
    try:
        decode(Layout, data)
    except InputError as error:
        refused = error
    assert refused is None or refused.problems


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": "8"}, "tp"),
        ({"dp": 2.5}, "dp"),
        ({"zero": 4}, "zero"),
        ({"precision": "bf61"}, "precision"),
        ({"order": "tp-dp"}, "order"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"virtual_stages": 2}, "virtual_stages"),
        ({"pp": 4, "virtual_stages": 2}, "schedule"),
        ({"pp": 4, "schedule": "zb-v"}, "virtual_stages"),
        ({"pp": 4, "schedule": "interleaved"}, "virtual_stages"),
        ({"expert_tp": 8}, "expert_tp"),
        ({"dp": 4, "shard": 2.0}, "shard"),
        ({"tp": True}, "tp"),
        ({"overlap_tp": "no"}, "overlap_tp"),
        ({"order": []}, "order"),
        ({"pp": 3, "schedule": "dualpipe"}, "pp"),
        ({"pp": 2, "stage_layers": (1, 2, 3)}, "stage_layers"),
        ({"pp": 2, "stage_layers": 4}, "stage_layers"),
        ({"dp": 8, "shard": 3}, "shard"),
        ({"dp": 8, "ep": 3}, "ep"),
        ({"dp": 4, "global_batch": 6}, "global_batch"),
        ({"recompute_ops": ("mlp",)}, "recompute_ops"),
        ({"recompute": "selective", "recompute_ops": ([],)}, "recompute_ops"),
        ({"recompute_layers": 2}, "recompute_layers"),
        ({"offload": ("disk",)}, "offload"),
        ({"offload_layers": 2}, "offload_layers"),
        ({"offload": ("activations",), "offload_layers": -1}, "offload_layers"),
    ],
)
def test_each_rule_names_its_field(values: dict[str, Any], field: str) -> None:
    assert field in problems_of(**values)


def test_every_problem_is_listed_at_once() -> None:
    assert set(problems_of(tp=0, zero=9, precision="x")) == {"tp", "zero", "precision"}


def test_a_mistyped_choice_suggests_the_nearest() -> None:
    assert "did you mean interleaved?" in problems_of(schedule="interleave")["schedule"]


def test_a_fix_that_is_offered_works() -> None:
    assert "use 96" in problems_of(dp=8, microbatch=3, global_batch=100)["global_batch"]
    assert Layout(dp=8, microbatch=3, global_batch=96).count_microbatches(96) == 4


def test_replacing_a_field_checks_again() -> None:
    with pytest.raises(InputError):
        msgspec.structs.replace(Layout(dp=8, ep=8), dp=4)


def test_plain_data_leaves_defaults_out() -> None:
    assert encode(Layout(tp=2)) == {"tp": 2}
