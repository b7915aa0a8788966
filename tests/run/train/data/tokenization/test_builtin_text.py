"""Text that every machine has."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.train.data import generate_builtin_documents
from meshwright.run.train.data.tokenization.builtin_text import (
    parse_builtin_bytes,
    write_builtin_text,
)

SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (-?\d+)(?: remainder (\d+))?")


def test_it_is_the_same_every_time() -> None:
    assert list(generate_builtin_documents(200_000)) == list(generate_builtin_documents(200_000))


def test_a_larger_text_begins_with_the_smaller() -> None:
    small = list(generate_builtin_documents(100_000))
    assert list(islice(generate_builtin_documents(300_000), len(small))) == small


def test_it_ends_near_its_limit() -> None:
    sizes = [len(text.encode()) for text in generate_builtin_documents(300_000)]
    assert 300_000 <= sum(sizes) < 300_000 + max(sizes)


def test_it_holds_documentation_sources_and_sums_that_are_right() -> None:
    texts = list(generate_builtin_documents(1_000_000))
    assert any("import " in text and "def " in text for text in texts)
    sums = [text for text in texts if SUM.match(text)]
    assert 0.08 < sum(map(len, sums)) / sum(map(len, texts)) < 0.16
    for line in sums[0].splitlines():
        one, sign, other, result, rest = SUM.fullmatch(line).groups()  # type: ignore[union-attr]
        if sign == "/":
            assert divmod(int(one), int(other)) == (int(result), int(rest))
        else:
            found = {"+": int(one) + int(other), "-": int(one) - int(other)}
            assert int(result) == found.get(sign, int(one) * int(other))


def test_it_is_written_as_json_lines(tmp_path: Path) -> None:
    write_builtin_text(tmp_path / "text.jsonl", 50_000)
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == list(generate_builtin_documents(50_000))


def test_its_size_is_part_of_its_name() -> None:
    assert parse_builtin_bytes("builtin:2MB") == 2_000_000
    assert parse_builtin_bytes("builtin") > 10**6
    with pytest.raises(InputError, match="asks for no text"):
        parse_builtin_bytes("builtin:0")
