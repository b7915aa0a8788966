"""The guide's page on models says what is true."""

import re
from pathlib import Path

from meshwright.spec.file_formats import parse
from meshwright.spec.model import CONVENTIONS, Model, count_parameters
from meshwright.spec.model.huggingface import list_model_types
from meshwright.spec.serialization import decode

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "guide" / "models.md").read_text("utf-8")


def test_guide_lists_every_family() -> None:
    quoted = " ".join(re.findall(r"^> (.*)$", PAGE, re.MULTILINE))
    assert tuple(quoted.split(", ")) == list_model_types()


def test_model_of_the_guide_can_be_read() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    mine = decode(Model, parse(text, ".toml", "models.md"))
    assert mine.layers == 42
    assert count_parameters(mine).experts > 0


def test_guide_names_every_convention() -> None:
    table = PAGE[PAGE.index("| convention |") :]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(CONVENTIONS)
