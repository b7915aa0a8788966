"""The `mw` directive: runs a command while the site is built and shows what it prints.

A page can therefore not drift from the program: a command that ends with another exit code than
the page says (`:code:`, 0 if left out) is a warning, and warnings fail the build.
"""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 400
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def shown(command: str, columns: int = 96) -> tuple[int, str]:
    """Run `mw command` as on a terminal of that width; return its exit code and what it prints."""
    terminal, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "xterm"}
    environment["MESHWRIGHT_NO_PROGRESS"] = "1"  # a bar on stderr is no part of the answer
    environment["MESHWRIGHT_CALIBRATIONS"] = "off"  # pages are the same on every machine
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *command.split()],
        stdin=subprocess.DEVNULL, stdout=child, stderr=child, cwd=ROOT, env=environment,
    )  # fmt: skip
    os.close(child)
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux ends a closed terminal with an error
            break
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    text = _STYLE.sub("", b"".join(parts).decode().replace("\r\n", "\n"))
    return process.wait(), "\n".join(line.rstrip() for line in text.rstrip().splitlines())


class Shown(SphinxDirective):
    """Shows a command and its output."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Callable[[str], object]]] = {
        "code": directives.nonnegative_int,
        "head": directives.positive_int,
    }

    def run(self) -> list[nodes.Node]:
        """Run the command and make a literal block of it."""
        command = self.arguments[0]
        code, text = shown(command)
        if code != self.options.get("code", 0):
            raise self.error(f"mw {command} ended with {code}:\n{text}")
        lines = text.splitlines()
        most = self.options.get("head", MOST_LINES)
        body = "\n".join(lines[:most]) + ("\n…" if len(lines) > most else "")
        block = nodes.literal_block(text=f"$ mw {command}\n{body}")
        block["language"] = "text"
        return [block]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("mw", Shown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
