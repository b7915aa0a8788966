"""API keys: read from a file and the environment, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from meshwright.errors import InputError, Problem

MIN_KEY_LENGTH = 8
"""A shorter key is a slip, not a secret."""
COMMENT_PATTERN = re.compile(r"(?:^|\s)#.*")
"""What a line says beside its key; one within a word is a part of the key."""


class ApiKeys:
    """The keys that a server takes, each with the name of its holder."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self._holders = tuple((_digest(key), name) for name, key in named)

    def __len__(self) -> int:
        return len(self._holders)

    def authenticate(self, authorization: str) -> str | None:
        """Return whose key a header `Authorization: Bearer KEY` has; None where it is nobody's."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = _digest(key.strip())
        found = None
        # All are compared, so that the time tells neither which one matched nor whether one did.
        for digest, name in self._holders:
            if hmac.compare_digest(digest, given):
                found = name
        return found


def read_api_keys(file: Path | None, variable: str) -> ApiKeys:
    """Read keys from a file of lines and from an environment variable.

    There they are separated by commas, or by lines, as secrets that are made of such a file are.
    """
    lines = [(variable, part) for part in re.split(r"[,\n]", os.environ.get(variable, ""))]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                [Problem(str(file), f"cannot read: {error}", "give a text file of keys")]
            ) from None
        lines += [
            (f"{file}:{number}", COMMENT_PATTERN.sub("", line))
            for number, line in enumerate(text.splitlines(), start=1)
        ]
    given = [(where, line.strip()) for where, line in lines if line.strip()]
    named = [_named(where, line, at) for at, (where, line) in enumerate(given)]
    if file is not None and not named:
        raise InputError([Problem(str(file), "holds no key", "write one `name: key` per line")])
    return ApiKeys(named)


def _named(where: str, line: str, at: int) -> tuple[str, str]:
    """Read `name: key` or a key alone; nothing of the key is ever shown."""
    name, colon, key = line.partition(":")
    if not colon:
        name, key = f"key{at}", line
    key = key.strip()
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or len(key.split()) > 1:
        what = f"a key needs at least {MIN_KEY_LENGTH} characters of ASCII without spaces"
        raise InputError([Problem(where, what, "make one with `openssl rand -hex 24`")])
    return name.strip(), key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
