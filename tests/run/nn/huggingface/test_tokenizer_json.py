"""Tokenizers of files: their rules are bounded, and a panic of the library is an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.file_errors import convert_library_errors
from meshwright.run.nn.huggingface.safetensors_header import open_safetensors
from meshwright.run.nn.huggingface.tokenizer_json import open_tokenizer_json
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from scripts.fuzzing.seed_files import make_tokenizer
from tests.scripts.hostile_files.model_cases import safetensors_cases


def _described(tmp_path: Path, **changes: Any) -> str:
    base = json.loads(next(iter(make_tokenizer(tmp_path))))
    return json.dumps(base | changes)


def test_a_panic_of_the_library_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(z+z+)+y"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    made = open_tokenizer_json(_described(tmp_path, pre_tokenizer=split), "tokenizer.json")
    with pytest.raises(InputError, match="retry-limit"):
        Tokenizer(made).encode("z" * 60)


def test_other_ends_of_the_process_pass() -> None:
    with pytest.raises(KeyboardInterrupt), convert_library_errors("x", "fails", "mend it"):
        raise KeyboardInterrupt


def test_texts_are_neither_padded_nor_cut(tmp_path: Path) -> None:
    made = open_tokenizer_json(_described(tmp_path), "tokenizer.json")
    assert len(made.encode("ab" * 200).ids) > 16
    assert len(made.encode("").ids) <= 1


@pytest.mark.parametrize("name", ["a tensor twice", "other tensors twice", "facts twice"])
def test_a_safetensors_file_with_a_name_twice_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_cases()["safetensors", name])
    with pytest.raises(InputError, match="fetch it again"):
        open_safetensors(path)
