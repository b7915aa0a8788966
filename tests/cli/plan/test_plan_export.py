import shlex

import pytest

from meshwright.cli.plan.plan_export import wrap_command
from tests.run.parallel.launch.hostile_text import WORDS


@pytest.mark.parametrize("word", [*WORDS, "a --b", "a --b --c " * 9, "it's --b"])
def test_a_wrapped_command_has_the_same_words(word: str) -> None:
    words = ["mw", "simulate", word, "--model", word, "--gpus", "8", "--cluster", f"{word} {word}"]
    words += ["--layout", "x" * 70, "--calibration", word]
    lines = wrap_command(shlex.join(words))
    assert shlex.split(lines.replace("\\\n", " ")) == words
