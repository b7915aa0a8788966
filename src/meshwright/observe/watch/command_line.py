"""A command line as it may be shown: what looks like a secret is left out."""

import re
import shlex
from collections.abc import Sequence

from meshwright.run.train.outputs.secrets import LEFT_OUT, without_secrets

_CHECKED = "x"
_KEY = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|glpat-|xox[abp]-|AKIA)[\w-]{12,}")
"""Keys that give themselves away by how they begin."""


def shown(words: Sequence[str]) -> str:
    """Return the command with the values of `--token`, `api_key=…` and logins left out."""
    parts: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            parts.append(LEFT_OUT)
            hide = False
            continue
        secret = _is_secret(name)
        hide = secret and not equals and word.startswith("-")
        said = (
            f"{name}={LEFT_OUT}" if secret and equals else _KEY.sub(LEFT_OUT, without_secrets(word))
        )
        parts.append(said if LEFT_OUT in said else shlex.quote(said))
    return " ".join(parts)


def _is_secret(name: str) -> bool:
    return bool(without_secrets(_CHECKED, name.lstrip("-")) == LEFT_OUT)
