"""Spec values in TOML, JSON and YAML files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model
from meshwright.spec.file_formats import FORMATS, dump, load, load_data, parse
from meshwright.spec.model import Model

DEEP = get_model("nemotron-3-super-120b-a12b")


@pytest.mark.parametrize("ending", FORMATS)
def test_value_comes_back_from_each_format(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{ending}"
    path.write_text(dump(DEEP, ending), encoding="utf-8")
    assert load(Model, path) == DEEP


def test_ending_may_be_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "MODEL.JSON"
    path.write_text(dump(DEEP, ".json"), encoding="utf-8")
    assert load(Model, path) == DEEP


def test_problem_names_the_file_and_the_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\nhidden = "wide"\nhiden = 3\n')
    with pytest.raises(InputError) as caught:
        load(Model, path)
    where = {problem.where for problem in caught.value.problems}
    assert {f"{path}: hidden", f"{path}: hiden", f"{path}: vocab"} <= where


def test_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown ending '.ini'.*\.toml, \.json"):
        load_data(tmp_path / "x.ini")


def test_missing_file_folder_and_binary_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        load_data(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match="cannot read as text"):
        load_data(tmp_path / "folder.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot read as text"):
        load_data(tmp_path / "binary.json")
    with pytest.raises(InputError, match="cannot read as text"):
        load_data("null\x00byte.json")


@pytest.mark.parametrize(
    ("ending", "text", "kind"),
    [(".toml", "a = ", "TOML"), (".json", "{", "JSON"), (".yaml", "a: [", "YAML")],
)
def test_broken_text_names_the_format(ending: str, text: str, kind: str) -> None:
    with pytest.raises(InputError, match=f"is not valid {kind}"):
        parse(text, ending, "file")


def test_top_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InputError, match="the top of the file is not a table"):
        load_data(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (".json", "[" * 100_000 + "]" * 100_000),
        (".toml", "a = " + "[" * 100_000 + "]" * 100_000),
        (".yaml", "[" * 3000 + "]" * 3000),
    ],
)
def test_endless_nesting_is_refused(ending: str, text: str) -> None:
    with pytest.raises(InputError):
        parse(text, ending, "file")


def test_aliases_that_multiply_are_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "laugh.yaml"
    path.write_text("\n".join([*lines, "hidden: *a11"]))
    with pytest.raises(InputError, match=r"laugh\.yaml: holds more than 1,000,000 values"):
        load(Model, path)


def test_merged_tables_that_multiply_are_refused_quickly() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 31)]
    with pytest.raises(InputError, match="with its aliases written out"):
        parse("\n".join(lines), ".yaml", "file")


@pytest.mark.parametrize("text", ["layout: &a {x: *a}", "a: &a [1, [*a]]", "&a {? *a : 1}"])
def test_alias_of_what_holds_it_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(InputError, match="line 1 holds itself") as caught:
        parse(text, ".yaml", "file")
    assert caught.value.problems[0].fix


def test_alias_of_a_finished_part_is_read() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}"
    assert parse(text, ".yaml", "file") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_yaml_number_without_a_dot_is_read(tmp_path: Path) -> None:
    # YAML 1.1 takes 1e-6 for text.
    path = tmp_path / "model.yaml"
    path.write_text(dump(DEEP, ".yaml") + "norm: {eps: 1e-6}\n")
    assert load(Model, path).norm.eps == 1e-6


@given(
    st.sampled_from(FORMATS), st.text(max_size=40) | st.from_regex(r"[-a:\[\]{}&*!|>'\"= \n]{1,12}")
)
def test_any_text_is_parsed_or_refused(ending: str, text: str) -> None:
    try:
        parse(text, ending, "file")
    except InputError as refusal:
        assert all(problem.fix for problem in refusal.problems)  # noqa: PT017


@given(st.sampled_from(FORMATS), st.data())
def test_damaged_file_is_read_or_refused(ending: str, data: st.DataObject) -> None:
    text = dump(DEEP, ending)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    hurt = text[:start] + data.draw(st.text(max_size=5)) + text[end:]
    try:
        table = parse(hurt, ending, "file")
        json.dumps(table, default=str)
    except InputError as refusal:
        assert all(problem.fix for problem in refusal.problems)  # noqa: PT017
