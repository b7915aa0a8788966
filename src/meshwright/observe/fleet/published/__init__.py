"""Published statistics of clusters beside ours, computed from the traces of the same clusters."""

from meshwright.observe.fleet.published.compare import Row, compared, our_figures

__all__ = ["Row", "compared", "our_figures"]
