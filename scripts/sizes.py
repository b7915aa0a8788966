"""Prints how large the project is: lines per package, long modules, and what a change adds.

    python -m scripts.sizes [--base COMMIT]

The base is the last commit unless told otherwise; in a repository without commits, or outside of
one, only the sizes are printed.
"""

import argparse
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASIDE = ("benchmarks", "docs", "examples", "scripts", "tests", "validation")
"""Folders beside the package that hold Python."""
LONG, TOO_LONG = 300, 400


def find_package(path: str) -> str:
    """The package or folder a file belongs to: `spec` for a file under src/meshwright/spec."""
    parts = Path(path).parts
    if parts[:2] == ("src", "meshwright"):
        return parts[2] if len(parts) > 3 else "(top)"
    return parts[0]


def lines_of(root: Path) -> dict[str, int]:
    """Lines of every Python file of the project, by path relative to the root."""
    folders = [root / "src" / "meshwright", *(root / name for name in ASIDE)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return {
        path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(files)
        if "_build" not in path.parts
    }


def count_per_package(lines: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Files and lines per package."""
    files: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for path, count in lines:
        files[find_package(path)] += 1
        total[find_package(path)] += count
    return {name: (files[name], total[name]) for name in sorted(files)}


def change(root: Path, base: str) -> dict[str, tuple[int, int]] | None:
    """Python lines added and removed per package since `base`; None where git cannot tell."""
    tracked = _git(root, "diff", "--numstat", base, "--", "*.py")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    if tracked is None or untracked is None:
        return None
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    for line in tracked.splitlines():
        plus, minus, path = line.split("\t")
        added[find_package(path)] += int(plus)
        removed[find_package(path)] += int(minus)
    for path in untracked.splitlines():
        added[find_package(path)] += len((root / path).read_text(encoding="utf-8").splitlines())
    return {name: (added[name], removed[name]) for name in sorted(added | removed)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "core.quotePath=false", *arguments]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def main() -> int:
    """Print the three tables."""
    parser = argparse.ArgumentParser(prog="sizes", description="How large the project is.")
    parser.add_argument("--base", default="HEAD", help="commit to compare with (HEAD)")
    base = parser.parse_args().base

    lines = lines_of(ROOT)
    print(f"{'package':<14}{'files':>7}{'lines':>9}")
    for name, (files, count) in count_per_package(lines.items()).items():
        print(f"{name:<14}{files:>7}{count:>9}")
    print(f"{'all':<14}{len(lines):>7}{sum(lines.values()):>9}")

    longest = sorted(((count, path) for path, count in lines.items() if count > LONG), reverse=True)
    print(f"\nmodules over {LONG} lines: {len(longest)}")
    for count, path in longest:
        print(f"  {count:>5}  {path}{'  (over ' + str(TOO_LONG) + ')' if count > TOO_LONG else ''}")

    delta = change(ROOT, base)
    if delta is None:
        print(f"\nno change to show: git does not know {base!r} here")
        return 0
    print(f"\nchange since {base}")
    for name, (plus, minus) in delta.items():
        print(f"{name:<14}{f'+{plus}':>8}{f'-{minus}':>8}{plus - minus:>+9}")
    plus, minus = (sum(pair[side] for pair in delta.values()) for side in (0, 1))
    print(f"{'all':<14}{f'+{plus}':>8}{f'-{minus}':>8}{plus - minus:>+9}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
