"""The `mw doctor` command: reports the hardware and software environment for bug reports."""
