"""Pages: what they may do in a browser."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.cli.render.html import render_chart_page, render_page
from meshwright.cli.result import NoteView, TextView

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')


def policy(page: str) -> dict[str, str]:
    match = POLICY.search(page)
    assert match
    return dict(part.strip().split(" ", 1) for part in match[1].split(";"))


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    found = policy(render_page("title", "<p>body</p>"))
    assert found["default-src"] == "'none'"
    assert "script-src" not in found
    assert found["form-action"] == found["base-uri"] == "'none'"


def test_the_one_script_of_a_page_is_allowed_by_its_digest() -> None:
    page = render_page("title", "<p>body</p>", "\nlet a = '<&>';\n")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy(page)["script-src"] == f"'sha256-{digest}'"


def test_the_policy_comes_before_anything_it_is_for() -> None:
    page = render_page("title", "<p>body</p>", "1")
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script>")


@pytest.mark.parametrize(
    "text", ["</title><script>1</script>", "<img src=x onerror=1>", '"><svg/>']
)
def test_titles_and_views_are_escaped(text: str) -> None:
    page = render_chart_page(text, "<svg></svg>", (NoteView(text), TextView(text)))
    assert text not in page


@pytest.mark.real
@pytest.mark.parametrize("script", ["", "document.title = 'own';"], ids=["none", "own"])
def test_a_browser_runs_no_script_but_the_pages_own(script: str, tmp_path: Path) -> None:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium")
    body = (
        "<p id=shown style='color: red'>text</p><script>document.title = 'injected'</script>"
        "<img src=x onerror=\"document.title = 'handler'\">"
    )
    path = tmp_path / "page.html"
    path.write_text(render_page("before", body, script))
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert f"<title>{'own' if script else 'before'}</title>" in done.stdout
