"""How requests show who asks: a token or a password, read from a file or the environment.

Nothing here has a readable form: neither an error, nor a log, nor a note ever holds a secret.
"""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.source import Secret


class Credentials(Protocol):
    """Says what goes behind `Authorization:`."""

    def header(self) -> str:
        """Return the value of the header; empty: none is sent."""
        ...


class NoCredentials:
    """Asks without a name."""

    def header(self) -> str:
        """Return nothing."""
        return ""


class BearerToken:
    """Asks with a token."""

    def __init__(self, token: Secret) -> None:
        self._token = token

    def header(self) -> str:
        """Return the token behind its kind."""
        return f"Bearer {self._token.reveal()}"


class BearerTokenFile:
    """Asks with a token from a file, read anew each time: service accounts' tokens change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header()

    def header(self) -> str:
        """Return the token that the file holds now."""
        return f"Bearer {_file(self._path, 'token_file')}"


class BasicAuth:
    """Asks with a user and a password."""

    def __init__(self, user: str, password: Secret) -> None:
        self._user, self._password = user, password

    def header(self) -> str:
        """Return both as HTTP wants them."""
        both = f"{self._user}:{self._password.reveal()}".encode()
        return "Basic " + base64.b64encode(both).decode()


def read_credentials(token: Secret, options: Mapping[str, str]) -> Credentials:
    """Choose among a token given, and what options name.

    These are `token_file`, `token_env`, and `user` with `password_file` or `password_env`.
    """
    if token:
        return BearerToken(token)
    if path := options.get("token_file"):
        return BearerTokenFile(Path(path))
    if name := options.get("token_env"):
        return BearerToken(Secret(_variable(name, "token_env")))
    user = options.get("user")
    if not user:
        return NoCredentials()
    if path := options.get("password_file"):
        return BasicAuth(user, Secret(_file(Path(path), "password_file")))
    if name := options.get("password_env"):
        return BasicAuth(user, Secret(_variable(name, "password_env")))
    fix = "add password_file=PATH or password_env=NAME"
    raise InputError([Problem("user", "has no password", fix)])


def _file(path: Path, where: str) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "is not text"
        what, fix = f"cannot read {path}: {said}", "name a file that holds the secret alone"
        raise InputError([Problem(where, what, fix)]) from None
    return _one_line(text, str(path), where)


def _variable(name: str, where: str) -> str:
    text = os.environ.get(name, "").strip()
    if not text:
        what, fix = f"the environment has no {name}", f"export {name}, or name another variable"
        raise InputError([Problem(where, what, fix)])
    return _one_line(text, name, where)


def _one_line(text: str, home: str, where: str) -> str:
    if not text or not text.isprintable():
        what = f"{home} holds {'nothing' if not text else 'more than one line'}"
        raise InputError([Problem(where, what, "put the secret there, in one line")])
    return text
