"""Helpers shared by timeline readers: Arrow arrays, timestamps, compression, names and arguments.

The modules are independent of any one trace format.
"""
