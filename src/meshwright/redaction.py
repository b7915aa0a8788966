"""`redact_secrets`: a configuration as others may read it; `is_secret`: what it would leave out."""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_ALWAYS = frozenset(
    {
        "apikey",
        "auth",
        "authorization",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "secret",
        "secrets",
    }
)
_ENDINGS = ("apikey", "passwd", "password")
"""Ends of words that are secrets too: `PGPASSWORD`."""
_AT_THE_END = frozenset({"key", "pat", "pwd", "token"})
"""`api_key` and `hf_token` are secrets, `key_bias` and `tokens_per_step` are not. `MYSQL_PWD` is a
password, `PWD` the folder where a shell stands."""
_LOGIN = re.compile(r"(?<=:/)(/?)[^/\s@]+@")
"""The login in `https://user:password@host`; as the path of a file it has one slash."""


def is_secret(name: str, value: str = "") -> bool:
    """Tell whether a variable holds a secret, by its name or by a login in an address."""
    return bool(redact_secrets(value, name) != value or redact_secrets("", name) == REDACTED)


def redact_secrets(value: Any, name: str = "") -> Any:
    """Return plain data with the values of secret names, and logins in addresses, left out."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words and _names_secret(words):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redact_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_secrets(item) for item in value]
    return redact_logins(value) if isinstance(value, str) else value


def redact_logins(text: str) -> str:
    """Return a text in which addresses have no login."""
    return _LOGIN.sub(r"\1", text)


def _names_secret(words: list[str]) -> bool:
    if not _ALWAYS.isdisjoint(words) or any(word.endswith(_ENDINGS) for word in words):
        return True
    return words[-1] in _AT_THE_END and words not in (["pwd"], ["oldpwd"], ["pat"])
