"""Names of users in the settings that bridges write: each stays one value of its format."""

import ast
import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml

from meshwright.errors import InputError
from meshwright.spec import catalog
from meshwright.spec.bridge import BRIDGES
from meshwright.spec.layout import Layout
from tests.run.parallel.launch.hostile_text import UNWRITABLE, WORDS

NAMES = [name for name in (*WORDS, *UNWRITABLE) if name.strip()]


@pytest.mark.parametrize("target", BRIDGES)
def test_settings_are_the_same_whatever_a_model_is_called(target: str, tmp_path: Path) -> None:
    """A name that broke out of its place would change how the text is read."""
    model, layout = catalog.get_model("llama3.1-8b"), Layout(tp=2, dp=4, zero=1)
    read = {
        "megatron": _read_shell, "torchtitan": _read_toml, "deepspeed": _read_json,
        "nemo": _read_either, "fsdp2": _read_python,
    }[target]  # fmt: skip
    plain = read(BRIDGES[target].export_config(layout, model).text)
    for name in NAMES:
        try:
            named = msgspec.structs.replace(model, name=name)
        except InputError:
            continue
        text = BRIDGES[target].export_config(layout, named).text
        assert _masked(read(text), name) == _masked(plain, model.name)
    assert not list(tmp_path.iterdir())


def _masked(read: str, name: str) -> str:
    return read.replace(json.dumps(name), '"NAME"')


def _read_shell(text: str) -> str:
    words = shlex.split(text, comments=True)
    done = subprocess.run(["bash", "-n"], input=f"true {text}", text=True, check=False)
    assert done.returncode == 0
    return json.dumps(words)


def _read_toml(text: str) -> str:
    return json.dumps(tomllib.loads(text))


def _read_json(text: str) -> str:
    return json.dumps(json.loads(text))


def _read_python(text: str) -> str:
    return ast.dump(ast.parse(text))


def _read_either(text: str) -> str:
    return json.dumps(yaml.safe_load(text)) if text.lstrip()[:1] not in "fi" else _read_python(text)
