"""Settings that say one thing twice are refused, and keys of many parts cost no time."""

import pytest

from meshwright.errors import InputError
from meshwright.spec.file_formats import MAX_KEY_PARTS, parse


@pytest.mark.parametrize(
    ("ending", "text"),
    [(".json", '{"a": {"tp": 1, "tp": 2}}'), (".yaml", "a: {tp: 1, tp: 1}"), (".toml", "a=1\na=1")],
)
def test_a_key_twice_is_refused(ending: str, text: str) -> None:
    with pytest.raises(InputError, match=r"twice|overwrite"):
        parse(text, ending, "job")


def test_a_json_key_twice_with_one_value_is_read() -> None:
    assert parse('{"a": [1], "a": [1]}', ".json", "job") == {"a": [1]}


def test_yaml_merges_may_stand_beside_each_other() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, z: 3}\nd: {<<: [*a, *b]}"
    assert parse(text, ".yaml", "job")["d"] == {"x": 1, "y": 2}  # type: ignore[index]


@pytest.mark.parametrize("part", ["a", '"a"', "'a'", "a-1 "])
def test_a_toml_key_of_many_parts_is_refused_before_it_is_parsed(part: str) -> None:
    key = ".".join([part] * 20_000)
    for text in (f"{key} = 1", f"[{key}]", f"x = {{{key} = 1}}"):
        with pytest.raises(InputError, match=f"more than {MAX_KEY_PARTS} parts"):
            parse(text, ".toml", "job")


def test_a_toml_key_of_some_parts_is_read() -> None:
    assert parse(".".join("abcdefgh") + " = 1", ".toml", "job") != {}
    assert parse('text = "' + "a b. " * 500 + '"', ".toml", "job") != {}
