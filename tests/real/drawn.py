"""Pages as a real browser draws them."""

import shutil
import subprocess
from pathlib import Path

import pytest

WIDTH = 1280


def drawn(page: Path, out: Path, height: int, *flags: str) -> dict[tuple[int, ...], int]:
    """How many pixels of each colour a screenshot has."""
    image = pytest.importorskip("PIL.Image")
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs Chromium to draw the page")
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--force-device-scale-factor=1", f"--window-size={WIDTH},{height}",
         "--virtual-time-budget=3000", f"--user-data-dir={out.parent / out.stem}",
         f"--screenshot={out}", *flags, page.as_uri()],
        capture_output=True, timeout=90, check=True,
    )  # fmt: skip
    with image.open(out) as shot:
        assert shot.size == (WIDTH, height)
        return {colour: count for count, colour in shot.convert("RGB").getcolors(1 << 24)}
