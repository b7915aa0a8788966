"""Reading plain data into spec values: strict, and every problem at once."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError, Problem
from meshwright.spec.catalog import get_model, list_models, read_cluster
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model import AttentionSpec, MLPSpec, Model, count_flops, count_parameters
from meshwright.spec.serialization import UNREADABLE, decode, encode, format_value


class Leaf(msgspec.Struct, frozen=True, kw_only=True, tag="leaf", tag_field="kind"):
    size_bytes: int = 0


class Twig(msgspec.Struct, frozen=True, kw_only=True, tag="twig", tag_field="kind"):
    leaves: tuple[Leaf, ...] = ()


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    height: int = 1
    age_s: float = 0.0
    waits_s: tuple[float, ...] = ()
    speed_bytes_per_s: float = 0.0
    share: float = 0.5
    green: bool = True
    shape: Literal["round", "tall"] = "round"
    span: tuple[int, int] = (0, 0)
    part: Leaf | Twig | None = None

    def __post_init__(self) -> None:
        if self.height < 1:
            raise InputError([Problem("height", f"{self.height} is not positive", "use 1")])


def problems_of(data: object, kind: Any = Tree, where: str = "") -> dict[str, Problem]:
    with pytest.raises(InputError) as caught:
        decode(kind, data, where)
    return {problem.where: problem for problem in caught.value.problems}


def test_fields_left_out_take_their_defaults() -> None:
    assert decode(Tree, {"name": "oak"}) == Tree(name="oak")


def test_quantities_are_read_by_the_end_of_the_field_name() -> None:
    tree = decode(
        Tree,
        {
            "name": "oak", "height": "16k", "age_s": "2h", "waits_s": ["1ms", 2],
            "speed_bytes_per_s": "400Gb/s", "share": "1e-5",
            "part": {"kind": "leaf", "size_bytes": "2KiB"},
        },
    )  # fmt: skip
    assert tree == Tree(
        name="oak", height=16_000, age_s=7200.0, waits_s=(0.001, 2.0), speed_bytes_per_s=5e10,
        share=1e-5, part=Leaf(size_bytes=2048),
    )  # fmt: skip


def test_every_problem_is_listed_with_its_path_value_and_fix() -> None:
    found = problems_of(
        {
            "nane": "oak", "height": "tall", "green": "yes", "shape": "rond", "span": [1],
            "share": float("nan"),
            "part": {"kind": "twig", "leaves": [{"kind": "leaf"}, {"kind": 1}]},
        }
    )  # fmt: skip
    assert set(found) == {
        "nane", "name", "height", "green", "shape", "span", "share", "part.leaves[1].kind",
    }  # fmt: skip
    assert found["nane"].fix == "did you mean name?"
    assert found["shape"].fix == "did you mean round?"
    assert "'yes' is not true or false" in found["green"].what
    assert "round, tall" in found["shape"].what
    assert all(problem.fix for problem in found.values())


@pytest.mark.parametrize(
    ("field", "example"),
    [("speed_bytes_per_s", "450GB/s"), ("age_s", "2us"), ("share", "0.5")],
)
def test_a_number_that_is_none_gets_an_example_in_its_unit(field: str, example: str) -> None:
    found = problems_of({"name": "oak", "height": 1, field: float("nan")})[field]
    assert "nan is not a finite number" in found.what
    assert example in found.fix


def test_problem_in_a_file_is_set_off_from_its_name() -> None:
    assert set(problems_of({"name": 3}, where="tree.toml: ")) == {"tree.toml: name"}


def test_rule_of_a_value_gets_the_path_of_its_field() -> None:
    found = problems_of({"blocks": [{"name": "a b"}]}, Model)
    assert "blocks[0].name" in found


class Bed(msgspec.Struct, frozen=True, kw_only=True):
    rows: int
    depth: int = 2
    tree: Tree | None = None
    note: str = ""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(rows=self.rows, depth=self.depth)
        if bounds.is_valid("rows", "depth") and self.rows % self.depth:
            bounds.add("rows", f"{self.rows} is odd for depth={self.depth}", "use an even number")
        if self.note == "weeds":
            bounds.add("note", "there are weeds", "pull them")
        bounds.raise_problems()


def test_rules_of_the_fields_that_read_well_are_checked_beside_those_that_did_not() -> None:
    assert set(problems_of({"rows": -4, "depth": "deep", "tree": 3}, Bed)) == {
        "rows", "depth", "tree",
    }  # fmt: skip


def test_rule_between_fields_waits_for_both() -> None:
    assert set(problems_of({"rows": 3}, Bed)) == {"rows"}
    assert set(problems_of({"rows": 3, "depth": "deep"}, Bed)) == {"depth"}
    # The default of a mistyped field must not be judged in its place.
    assert set(problems_of({"rows": 3, "dept": 3}, Bed)) == {"dept"}


def test_rule_that_needs_what_was_not_read_says_nothing() -> None:
    assert set(problems_of({"rows": 0, "note": 7}, Bed)) == {"note"}


def test_faults_of_a_model_hide_none_of_the_others() -> None:
    found = problems_of(
        {
            "name": "x", "hidden": "wide", "vocab": -5, "pattern": "2*(dense",
            "blocks": [
                {"name": "dense", "mlp": {"kind": "mlp", "widht": 4}},
                {"name": "moe", "mlp": {"kind": "experts", "count": 0, "top_k": "x", "width": -1}},
            ],
        },
        Model,
        "mine.toml: ",
    )  # fmt: skip
    assert {where.removeprefix("mine.toml: ") for where in found} == {
        "hidden", "vocab", "pattern", "blocks[0].mlp.widht", "blocks[0].mlp.width",
        "blocks[1].mlp.count", "blocks[1].mlp.top_k", "blocks[1].mlp.width",
    }  # fmt: skip


def test_faults_of_a_cluster_hide_none_of_the_others() -> None:
    table = {
        "name": "lab", "title": "Lab", "gpu": "h10", "nodes": -4, "price_per_gpu_hour": "x",
        "scale_up": {"kind": "nvlnk", "gpus": 0, "gpu_bytes_per_s": -1, "latency_s": 0},
        "host": {"gpu_bytes_per_s": 1e9, "latency_s": "x", "sockets": 0},
    }  # fmt: skip
    with pytest.raises(InputError) as caught:
        read_cluster(table)
    assert {problem.where for problem in caught.value.problems} == {
        "gpu", "nodes", "price_per_gpu_hour", "scale_up.kind", "scale_up.gpus",
        "scale_up.gpu_bytes_per_s", "host.latency_s", "host.sockets",
    }  # fmt: skip


def test_what_was_not_read_answers_nothing() -> None:
    uses: list[Callable[[Any], object]] = [
        bool, hash, len, iter, lambda it: it == 1, lambda it: it < 1, lambda it: it.name,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError):
            use(UNREADABLE)


def test_whole_value_of_the_wrong_kind_is_set_at_the_file() -> None:
    assert set(problems_of(5, Model, "mine.toml: ")) == {"mine.toml"}


def test_unknown_kind_of_a_union_is_refused_with_the_nearest() -> None:
    found = problems_of({"name": "oak", "part": {"kind": "leav"}})
    assert found["part.kind"].fix == "did you mean leaf?"
    found = problems_of({"name": "oak", "part": {}})
    assert "leaf, twig" in found["part.kind"].fix


def test_wrong_kind_for_a_single_type_is_refused() -> None:
    assert "kind" in problems_of({"kind": "leaf"}, Twig)
    assert decode(Twig, {"kind": "twig"}) == Twig()


@pytest.mark.parametrize("data", [None, 3, "text", [], [1], True])
def test_what_is_no_table_is_refused(data: object) -> None:
    assert "is not a table of fields" in next(iter(problems_of(data).values())).what


def test_true_is_no_number_and_one_is_no_switch() -> None:
    assert set(problems_of({"name": "x", "height": True, "green": 1})) == {"height", "green"}


def test_number_too_large_for_a_float_is_refused() -> None:
    assert "share" in problems_of({"name": "x", "share": 10**400})


def test_values_already_read_pass_through() -> None:
    leaf = Leaf(size_bytes=1)
    assert decode(Tree, {"name": "oak", "part": leaf}).part is leaf


def test_plain_leaves_out_defaults_and_keeps_the_kind() -> None:
    tree = Tree(name="oak", part=Twig(leaves=(Leaf(), Leaf(size_bytes=2))))
    assert encode(tree) == {
        "name": "oak",
        "part": {"kind": "twig", "leaves": [{"kind": "leaf"}, {"kind": "leaf", "size_bytes": 2}]},
    }


@pytest.mark.parametrize("name", list_models())
def test_catalog_model_is_read_back_from_plain_data(name: str) -> None:
    assert decode(Model, encode(get_model(name))) == get_model(name)


def test_shown_is_short_even_where_aliases_stand_for_endless_data() -> None:
    data: list[object] = [1]
    for _ in range(60):
        data = [data, data]
    assert len(format_value(data)) <= 60
    loop: list[object] = []
    loop.append(loop)
    assert len(format_value(loop)) <= 60
    assert format_value(10**5000)
    assert format_value("x" * 1000) == "'" + "x" * 58 + "…"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from([10**400, -(2**63), "1e9", "attention", "mlp", "3*a", "a"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from([
            "name", "hidden", "vocab", "blocks", "pattern", "mixer", "mlp", "kind", "heads",
            "kv_heads", "head_dim", "width", "rotary", "theta", "norm", "eps", "vision",
        ]) | st.text(max_size=4),
        inner,
        max_size=6,
    ),
    max_leaves=20,
)  # fmt: skip


@given(json_values)
def test_any_data_is_read_or_refused(data: object) -> None:
    for kind in (Model, AttentionSpec, MLPSpec, Tree):
        try:
            value = decode(kind, data)
        except InputError as refusal:
            incomplete = [p for p in refusal.problems if not (p.what and p.fix)]
        else:
            incomplete = []
            assert isinstance(value, kind)
        assert incomplete == []


@given(st.data())
def test_catalog_model_with_odd_values_is_read_or_refused(data: st.DataObject) -> None:
    table = encode(get_model(data.draw(st.sampled_from(sorted(list_models())))))
    here: Any = table
    for _ in range(data.draw(st.integers(0, 4))):
        inner = here if isinstance(here, dict) else dict(enumerate(here))
        deeper = [item for item in inner.values() if isinstance(item, dict | list) and item]
        if not deeper:
            break
        here = data.draw(st.sampled_from(deeper))
    key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
    here[key] = data.draw(json_values)
    try:
        described = decode(Model, table)
    except InputError as refusal:
        incomplete = [p for p in refusal.problems if not (p.where and p.what and p.fix)]
    else:
        incomplete = []
        assert count_parameters(described).total > 0
        assert count_flops(described, 100).total > 0
    assert incomplete == []
