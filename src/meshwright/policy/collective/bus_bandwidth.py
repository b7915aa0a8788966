"""`bus_factor`: bus bandwidth over algorithm bandwidth, as nccl-tests defines them."""


def bus_factor(op: str, ranks: int) -> float:
    """Return what size over time is multiplied with to be comparable between rank counts.

    The factors are those of nccl-tests (doc/PERFORMANCE.md): with them, an algorithm that fills
    its links shows the speed of a link, whatever the number of ranks.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (ranks - 1) / ranks
