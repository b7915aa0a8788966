"""Compute efficiency: operator FLOP and byte counts, kernel tables, MFU and roofline.

The counts come from operator shapes recorded in a trace; `mfu` and `roofline` compare them with
the peak of the device.
"""
