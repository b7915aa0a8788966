"""The `mw analyze` and `mw memory` commands: run overviews, findings and HTML reports."""
