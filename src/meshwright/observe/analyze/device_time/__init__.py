"""Device time per rank: breakdown, idle gaps, overlap, launches, regions and host stalls.

Each module holds one analysis; `kernel_classes` and `kernel_names` are shared by them.
"""
