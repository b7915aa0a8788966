"""Licences are read from metadata of every generation, and those with conditions are refused."""

from email.message import Message
from importlib.metadata import Distribution
from typing import Any

import pytest

from scripts.check_licenses import (
    PackageLicense,
    is_allowed,
    list_shipped_packages,
    main,
    read_license,
)


class InstalledPackage(Distribution):
    def __init__(self, *fields: tuple[str, str]) -> None:
        self.fields = fields

    @property
    def metadata(self) -> Any:
        message = Message()
        for name, value in self.fields:
            message[name] = value
        return message

    def read_text(self, filename: str) -> str | None:
        raise NotImplementedError

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("(GPL-2.0-only OR MIT) AND BSD-3-Clause", True),
        ("GPL-3.0-only", False),
        ("(MIT OR BSD-2-Clause) AND GPL-2.0-only", False),
        ("MIT AND (GPL-2.0-only OR ISC", False),
        ("MIT MIT", False),
        ("MIT AND AGPL-3.0-only", False),
        ("LicenseRef-Proprietary", False),
        ("", False),
    ],
)
def test_every_part_of_an_expression_is_judged(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def test_expression_is_preferred_to_classifiers() -> None:
    package = InstalledPackage(
        ("Classifier", "License :: OSI Approved :: GNU General Public License (GPL)"),
        ("License-Expression", "MIT"),
    )
    assert read_license(package) == "MIT"


def test_classifiers_are_read_where_there_is_no_expression() -> None:
    package = InstalledPackage(
        ("License", "see the file"),
        ("Classifier", "License :: OSI Approved"),
        ("Classifier", "License :: OSI Approved :: MIT License"),
        ("Classifier", "License :: OSI Approved :: GNU General Public License (GPL)"),
    )
    license_text = read_license(package)
    assert license_text == "MIT AND GNU General Public License (GPL)"
    assert not is_allowed(license_text)


def test_first_line_of_the_license_field_is_the_last_choice() -> None:
    package = InstalledPackage(("License", "Apache 2.0\nthe whole text of the licence"))
    assert read_license(package) == "APACHE-2.0"


def test_package_without_a_licence_is_refused() -> None:
    assert not PackageLicense("mystery", "1.0", read_license(InstalledPackage())).is_allowed


def test_packages_that_users_install_have_allowed_licences() -> None:
    packages = {package.name: package for package in list_shipped_packages()}
    assert {"msgspec", "numpy", "rich"} <= packages.keys()
    assert "pytest" not in packages, "a tool for developers"
    assert main([]) == 0
