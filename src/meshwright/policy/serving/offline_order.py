"""`longest_first`: in which order requests begin that are all there."""

from collections.abc import Sequence


def longest_first(most: Sequence[int]) -> list[int]:
    """Return the numbers of requests in the order of the tokens that they may write, most first.

    Everything lasts until the longest answer ends, and one that begins late ends alone: its steps
    read all weights for one row. Requests that may write as much keep their order.
    """
    return sorted(range(len(most)), key=lambda number: -most[number])
