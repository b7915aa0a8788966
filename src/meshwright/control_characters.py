r"""`escape_control_characters`: text of foreign files as a terminal or a comment may show it.

A name with ESC can retitle, overwrite or answer a terminal; a bidirectional override shows a line
in another order than it is read. Such characters are shown as Python writes them: `\x1b`, `\u202e`.
"""

import re

_CONTROL = (
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, overrides and isolates
    "\u2028\u2029"  # line and paragraph separator
    "\ud800-\udfff"  # surrogates: bytes that are no UTF-8
    "\ufeff\ufff9-\ufffb"  # byte order mark, interlinear annotation
)
_ANY = re.compile(f"[{_CONTROL}]")
_BUT_LINES = re.compile(rf"(?![\n\t])[{_CONTROL}]")


def escape_control_characters(text: str, *, keep_lines: bool = False) -> str:
    """Return text in which every control character is written out.

    With `keep_lines` line ends and tabs stay as they are.
    """
    return (_BUT_LINES if keep_lines else _ANY).sub(_written_out, text)


def has_control_characters(text: str) -> bool:
    """Tell whether a text holds a control character, a line end or a tab among them."""
    return _ANY.search(text) is not None


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
