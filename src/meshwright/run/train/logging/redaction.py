"""`redact_secrets`: a configuration as others may read it."""

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
_AT_THE_END = frozenset({"key", "token"})
"""`api_key` and `hf_token` are secrets, `key_bias` and `tokens_per_step` are not."""
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
"""The login in `https://user:password@host`."""


def redact_secrets(value: Any, name: str = "") -> Any:
    """Return plain data with the values of secret names, and logins in addresses, left out."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words and (not _ALWAYS.isdisjoint(words) or words[-1] in _AT_THE_END):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redact_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_secrets(item) for item in value]
    return _LOGIN.sub("", value) if isinstance(value, str) else value
