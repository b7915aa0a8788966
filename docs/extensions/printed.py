"""The `printed` directive: shows the Markdown that a module of scripts/ prints at build time.

    ```{printed} scripts.overlap_table
    ```

So no figure of such a table is copied by hand, and none can be out of date.
"""

import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


class Printed(SphinxDirective):
    """Shows what a module prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Run the module and lay out what it prints."""
        words = [sys.executable, "-m", self.arguments[0]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise self.error(f"{self.arguments[0]} ended with {done.returncode}:\n{done.stderr}")
        return self.parse_text_to_nodes(done.stdout)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("printed", Printed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
