import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.fleet.sources.prometheus.promql_text import (
    check_label,
    match_any,
    match_value,
    quote_string,
)

VALUES = [
    "GPU-5fd4f087-86f3-7a43-b711-4771313afc50",
    "node1.cluster:9400",
    'a"b',
    '"} or up{a="',
    "a\\",
    "\\",
    "\\\\",
    "^a$",
    "a.b",
    "a|b",
    "(a)",
    "a*",
    "a+",
    "a?",
    "[a]",
    "[^a]",
    "a{2}",
    "a]",
    "-",
    "a-b",
    "\\d",
    "\\Q.\\E",
    "(?i)a",
    "$node",
    "a b",
    "a\nb",
    "a\tb",
    "\x1b[31m",
    "\x00",
    "\x7f",
    "'",
    "`",
    "#",
    "a,b",
    "a=b",
    "ümläut",
    "日本",
    "🙂",
    "",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_string_of_promql_is_the_text(value: str) -> None:
    quoted = quote_string(value)
    assert "\n" not in quoted
    assert ast.literal_eval(quoted) == value


@pytest.mark.parametrize("value", VALUES)
def test_a_pattern_of_values_matches_each_of_them_and_nothing_else(value: str) -> None:
    label, _, quoted = match_any("UUID", [value, "other"]).partition("=~")
    pattern = re.compile(ast.literal_eval(quoted))
    assert label == "UUID"
    assert [one for one in VALUES if pattern.fullmatch(one)] == [value]


@pytest.mark.parametrize("name", ["", "a b", "a-b", "1a", 'a="x"', "a\n", "a}", "ä", "a.b"])
def test_what_is_no_name_of_a_label_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a label"):
        check_label(name)


def test_promtool_reads_every_matcher(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool (apt install prometheus)")
    matchers = [match_value("a", value) for value in VALUES]
    matchers += [match_any("a", [value, "x"]) for value in VALUES]
    rules = [{"record": f"r{at}", "expr": f"up{{{one}}}"} for at, one in enumerate(matchers)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}, ensure_ascii=False))
    done = subprocess.run(
        [program, "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(matchers)} rules found" in done.stdout
