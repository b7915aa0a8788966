"""Output rendering for all commands: terminal tables, JSON, HTML pages and SVG charts.

`terminal` prints a `CommandResult`; the other modules render charts, pages and progress.
"""
