"""Small networks drawn by hand, whose best rates can be worked out on paper."""

from meshwright.spec.cluster.links import Link, LinkGraph, Vertex, both_ways


def mesh(gpus: int, rate: float = 10e9, missing: set[tuple[int, int]] | None = None) -> LinkGraph:
    """Return GPUs with a link between every two, except the missing."""
    pairs = [(a, b) for a in range(gpus) for b in range(a + 1, gpus)]
    kept = [pair for pair in pairs if pair not in (missing or set())]
    return drawn(gpus, dict.fromkeys(kept, rate))


def drawn(gpus: int, rates: dict[tuple[int, int], float]) -> LinkGraph:
    """Return GPUs with links of given rates, as much there as back."""
    links: list[Link] = []
    for (a, b), rate in rates.items():
        links += both_ways(f"gpu{a}", f"gpu{b}", "nvlink", rate, 1e-6)
    vertices = tuple(Vertex(name=f"gpu{rank}", kind="gpu") for rank in range(gpus))
    return LinkGraph(vertices=vertices, links=tuple(links))


def star(rates: list[float]) -> LinkGraph:
    """Return GPUs around one switch."""
    links: list[Link] = []
    for rank, rate in enumerate(rates):
        links += both_ways(f"gpu{rank}", "switch", "nvlink", rate, 1e-6)
    gpus = [Vertex(name=f"gpu{rank}", kind="gpu") for rank in range(len(rates))]
    return LinkGraph(vertices=(*gpus, Vertex(name="switch", kind="nvswitch")), links=tuple(links))
