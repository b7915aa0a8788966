"""The naming rules find each kind of violation, and the package has none."""

from pathlib import Path

from scripts.check_names import MAX_MODULES, PACKAGE, find_violations


def write_package(root: Path, files: dict[str, str]) -> Path:
    package = root / "meshwright"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_package_has_no_violation() -> None:
    assert find_violations(PACKAGE) == []


def test_public_class_in_two_modules_is_a_violation(tmp_path: Path) -> None:
    text = "class Plan: ...\nclass _Row: ...\n"
    (violation,) = find_violations(write_package(tmp_path, {"a.py": text, "b/c.py": text}))
    assert violation.startswith("shared class name: Plan in a.py, b/c.py")


def test_folder_with_too_many_modules_is_a_violation(tmp_path: Path) -> None:
    files = {f"wide/m{index}.py": "" for index in range(MAX_MODULES + 1)}
    (violation,) = find_violations(write_package(tmp_path, files | {"wide/__init__.py": ""}))
    assert violation.startswith("wide folder: wide has 21 modules")


def test_module_name_in_four_folders_is_a_violation(tmp_path: Path) -> None:
    files = {f"{folder}/{name}.py": "" for folder in "abcd" for name in ("state", "command")}
    (violation,) = find_violations(write_package(tmp_path, files))
    assert violation.startswith("repeated module: state in a, b, c, d")


def test_module_hidden_by_an_export_is_a_violation(tmp_path: Path) -> None:
    init = "from meshwright.room.plan import plan\n__all__ = ['plan']\n"
    files = {"room/__init__.py": init, "room/plan.py": "def plan() -> None: ...\n"}
    (violation,) = find_violations(write_package(tmp_path, files))
    assert violation.startswith("hidden module: room exports plan")


def test_package_may_export_its_own_modules(tmp_path: Path) -> None:
    init = "from meshwright.room import plan\n__all__ = ['plan']\n"
    assert (
        find_violations(write_package(tmp_path, {"room/__init__.py": init, "room/plan.py": ""}))
        == []
    )
