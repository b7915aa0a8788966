"""Check the licences of the packages that Meshwright installs: `python -m scripts.check_licenses`.

The check covers what `pip install meshwright[EXTRAS]` brings, directly and through other packages,
as far as it is installed here; tools that only a developer needs are left out. A package passes if
its metadata names a licence of `ALLOWED`. Licences without conditions on the code that imports the
package are allowed, and so is the MPL, whose conditions cover only its own files.

Prints one line for each violation and exits with 1 if there are any. `--list` prints every package
with its licence.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "meshwright"
NOT_SHIPPED = frozenset({"dev"})
"""Extras for developers, whose packages users do not install."""
ALLOWED = frozenset(
    {
        "0BSD",
        "APACHE-2.0",
        "BSD-2-CLAUSE",
        "BSD-3-CLAUSE",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-PYTHON",
        "ISC",
        "MIT",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "UNLICENSE",
        "ZLIB",
    }
)
"""SPDX identifiers, in capitals."""
OTHER_SPELLINGS = {
    "3-CLAUSE BSD LICENSE": "BSD-3-CLAUSE",
    "APACHE 2.0": "APACHE-2.0",
    "APACHE LICENSE 2.0": "APACHE-2.0",
    "APACHE SOFTWARE LICENSE": "APACHE-2.0",
    "BSD LICENSE": "BSD-3-CLAUSE",
    "ISC LICENSE (ISCL)": "ISC",
    "MIT LICENSE": "MIT",
    "MOZILLA PUBLIC LICENSE 2.0 (MPL 2.0)": "MPL-2.0",
    "PYTHON SOFTWARE FOUNDATION LICENSE": "PSF-2.0",
    "THE UNLICENSE (UNLICENSE)": "UNLICENSE",
}
"""Licence names of older metadata, in capitals, and their identifiers."""


class PackageLicense(NamedTuple):
    """An installed package and the licence that its metadata states."""

    name: str
    version: str
    license: str
    """An SPDX expression, or empty if the metadata states none."""

    @property
    def is_allowed(self) -> bool:
        """Whether the conditions of the licence are acceptable."""
        return is_allowed(self.license)


def is_allowed(expression: str) -> bool:
    """Decide whether an SPDX expression is acceptable: all parts of AND, one part of OR."""
    tokens = re.findall(
        r"[()]|(?:AND|OR)\b|[^\s()]+(?:\s+(?!AND\b|OR\b)[^\s()]+)*", expression.upper()
    )
    allowed, rest = _evaluate_or(tokens)
    return allowed and not rest


def _evaluate_or(tokens: list[str]) -> tuple[bool, list[str]]:
    """Return the value of the expression at the start of the tokens, and the tokens after it."""
    allowed, tokens = _evaluate_and(tokens)
    while tokens[:1] == ["OR"]:
        other, tokens = _evaluate_and(tokens[1:])
        allowed = allowed or other
    return allowed, tokens


def _evaluate_and(tokens: list[str]) -> tuple[bool, list[str]]:
    allowed, tokens = _evaluate_name(tokens)
    while tokens[:1] == ["AND"]:
        other, tokens = _evaluate_name(tokens[1:])
        allowed = allowed and other
    return allowed, tokens


def _evaluate_name(tokens: list[str]) -> tuple[bool, list[str]]:
    if tokens[:1] == ["("]:
        allowed, tokens = _evaluate_or(tokens[1:])
        return allowed and tokens[:1] == [")"], tokens[1:]
    name = tokens[0] if tokens else ""
    return name.split(" WITH ")[0] in ALLOWED, tokens[1:]


def read_license(package: Distribution) -> str:
    """Return the licence that the metadata of a package states, as an SPDX expression."""
    metadata = package.metadata
    if expression := metadata.get_all("License-Expression"):
        return str(expression[0])
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    text = str((metadata.get_all("License") or [""])[0])
    names = classifiers or [text.strip().partition("\n")[0]]
    return " AND ".join(OTHER_SPELLINGS.get(name.upper(), name) for name in names)


def list_shipped_packages() -> Iterator[PackageLicense]:
    """Yield the installed packages that users install with Meshwright or one of its extras."""
    seen: set[tuple[str, frozenset[str]]] = set()
    yielded = {PROJECT}
    project = distribution(PROJECT)
    extras = set(project.metadata.get_all("Provides-Extra") or ()) - NOT_SHIPPED
    waiting: list[tuple[str, frozenset[str]]] = [(PROJECT, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        if name not in yielded:
            yielded.add(name)
            yield PackageLicense(name, package.version, read_license(package))
        for line in package.requires or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))


def main(arguments: list[str] | None = None) -> int:
    """Print violations, or with `--list` every package; return the exit code."""
    parser = argparse.ArgumentParser(description="Check the licences of installed packages.")
    parser.add_argument("--list", action="store_true", help="print every package")
    list_all = parser.parse_args(arguments).list
    packages = sorted(list_shipped_packages())
    violations = [package for package in packages if not package.is_allowed]
    for package in packages if list_all else violations:
        problem = "" if package.is_allowed else "  not in the list of allowed licences"
        print(f"{package.name} {package.version}  {package.license or 'no licence'}{problem}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
