"""Small networks drawn by hand, whose best rates can be worked out on paper."""

from meshwright.spec.cluster.link_graph import GraphLink, GraphVertex, LinkGraph, make_duplex_links


def mesh(gpus: int, rate: float = 10e9, missing: set[tuple[int, int]] | None = None) -> LinkGraph:
    """Return GPUs with a link between every two, except the missing."""
    pairs = [(a, b) for a in range(gpus) for b in range(a + 1, gpus)]
    kept = [pair for pair in pairs if pair not in (missing or set())]
    return drawn(gpus, dict.fromkeys(kept, rate))


def drawn(gpus: int, rates: dict[tuple[int, int], float]) -> LinkGraph:
    """Return GPUs with links of given rates, as much there as back."""
    links: list[GraphLink] = []
    for (a, b), rate in rates.items():
        links += make_duplex_links(f"gpu{a}", f"gpu{b}", "nvlink", rate, 1e-6)
    vertices = tuple(GraphVertex(name=f"gpu{rank}", kind="gpu") for rank in range(gpus))
    return LinkGraph(vertices=vertices, links=tuple(links))


def star(rates: list[float]) -> LinkGraph:
    """Return GPUs around one switch."""
    links: list[GraphLink] = []
    for rank, rate in enumerate(rates):
        links += make_duplex_links(f"gpu{rank}", "switch", "nvlink", rate, 1e-6)
    gpus = [GraphVertex(name=f"gpu{rank}", kind="gpu") for rank in range(len(rates))]
    return LinkGraph(
        vertices=(*gpus, GraphVertex(name="switch", kind="nvswitch")), links=tuple(links)
    )
