"""Collective algorithms: ring, tree, Bruck, PAT, hierarchical, in-network and all-to-all.

Every builder takes an `AlgorithmShape`; `library.build_algorithm` selects a builder by name.
"""
