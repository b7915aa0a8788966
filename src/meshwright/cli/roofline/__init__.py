"""The `mw roofline` command: compares profiled kernels with the device roofline."""
