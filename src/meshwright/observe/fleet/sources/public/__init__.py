"""Public traces of GPU clusters, told by their columns: Acme, Philly, Helios, Alibaba, others."""

from meshwright.observe.fleet.sources.public.reading import PublicTrace, claims, found_in, source

__all__ = ["PublicTrace", "claims", "found_in", "source"]
