"""The examples of the guide are what the program answers."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[4] / "docs" / "guide" / "collective-formats.md"


def test_the_guide_shows_what_the_program_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```pycon\n(.*?)```", text, flags=re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=said.append)
    assert outcome.attempted > 15
    assert outcome.failed == 0, "".join(said)
