"""Values of labels in queries: quoted, so that a name of a pod or GPU stays one value.

PromQL's strings are Go's, its patterns RE2's (https://prometheus.io/docs/prometheus/latest/querying).
"""

import re
from collections.abc import Iterable

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")
_QUOTED = re.compile('[\\\\"\x00-\x1f\x7f\ud800-\udfff]')


def match_value(label: str, value: str) -> str:
    """Return the matcher of one value of a label."""
    return f"{check_label(label)}={quote_string(value)}"


def match_any(label: str, values: Iterable[str]) -> str:
    """Return the matcher of any of some values of a label, each of which stands for itself."""
    pattern = "|".join(_META.sub(lambda meta: f"\\{meta[0]}", value) for value in values)
    return f"{check_label(label)}=~{quote_string(pattern)}"


def quote_string(text: str) -> str:
    """Return a text as a string of PromQL."""
    return f'"{_QUOTED.sub(_escape, text)}"'


def check_label(name: str) -> str:
    """Return the name of a label; raise where it is none."""
    if not _LABEL.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a label")
    return name


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in '\\"':
        return f"\\{match[0]}"
    # A surrogate stands for bytes that are no UTF-8: no label has them.
    return f"\\x{code:02x}" if code < 0x80 else "\\ufffd"
