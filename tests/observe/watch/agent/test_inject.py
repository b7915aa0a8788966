"""The hook in processes of its own: what it must not change, and that it finds torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.observe.watch.job_process import INJECT_FOLDER, build_environment
from meshwright.observe.watch.watch_folder import WatchFolder, create_watch_folder

TORCH = "class Optimizer:\n    pass\n__version__ = '0.0'\n"


def python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    return create_watch_folder(tmp_path / "w", {})


def test_path_is_as_without_the_hook_and_next_to_nothing_is_loaded(folder: WatchFolder) -> None:
    code = "import sys, json; print(json.dumps([sys.path, sorted(sys.modules)]))"
    plain = json.loads(python(code, dict(os.environ)))
    hooked = json.loads(python(code, build_environment(os.environ, folder)))
    assert hooked[0] == plain[0]
    assert set(hooked[1]) - set(plain[1]) <= {"__future__", "sitecustomize"}


def test_the_users_own_sitecustomize_runs_under_its_name(
    folder: WatchFolder, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("MINE = 5\nprint('theirs')\n")
    env = build_environment(os.environ | {"PYTHONPATH": str(theirs)}, folder)
    said = python("import sitecustomize; print(sitecustomize.MINE, sitecustomize.__file__)", env)
    assert said.splitlines() == ["theirs", f"5 {theirs / 'sitecustomize.py'}"]


@pytest.mark.parametrize("given", ["", "/no/such/folder", "\n", __file__])
def test_a_malformed_environment_harms_nothing(given: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    env = dict(os.environ) | {
        "MESHWRIGHT_WATCH": given,
        "PYTHONPATH": f"{INJECT_FOLDER}{os.pathsep}{tmp_path}",
    }
    assert python("import torch; print(torch.__spec__.loader.__class__.__name__)", env) == (
        "SourceFileLoader\n"
    )


def test_a_torch_that_cannot_be_watched_is_imported_all_the_same(
    folder: WatchFolder, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    env = build_environment(os.environ | {"PYTHONPATH": str(tmp_path)}, folder)
    assert python("import torch; print(torch.__loader__.__class__.__name__)", env) == (
        "SourceFileLoader\n"
    )
    assert "could not begin to watch" in folder.log.read_text()


def test_a_torch_that_is_missing_is_missed_as_ever(folder: WatchFolder) -> None:
    code = (
        "import sys\nsys.path.clear()\n"
        "try:\n    import torch\nexcept ImportError as error:\n    print(error.name)"
    )
    assert python(code, build_environment(os.environ, folder)) == "torch\n"
