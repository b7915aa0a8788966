"""`SafeLogFormatter`: log lines that do nothing to the terminal they are shown in."""

import logging

from meshwright.control_characters import escape_control_characters


class SafeLogFormatter(logging.Formatter):
    """Formats log records, tracebacks among them, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return escape_control_characters(super().format(record), keep_lines=True)
