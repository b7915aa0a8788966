"""Sequence packing: concatenation, best fit and no packing, with cached packing plans.

Each packing implements `SequencePacking`; `packing_cache` stores packing plans on disk.
"""
