"""Detectors of fleet inefficiency patterns, one module per category.

Each detector reads `FleetData` and returns its detections.
"""
