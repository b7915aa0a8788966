"""How NCCL cuts a message into chunks that follow each other on a channel.

Source: NCCL 2.27, `calcCollChunking` in src/enqueue.cc. A chunk begins as one step of the
protocol's buffer (an eighth of 4 MiB, of 614,400 · 8 bytes with 120 of 128 used, of 512 KiB with
half used) and shrinks for messages that would be too few of them.
"""

from meshwright.predict.network.constants import fixed
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuning import Entry

STEP_BYTES = {"simple": 524288, "ll128": 576000, "ll": 32768}
NVLS_BYTES = 131072
_NVLS_SHRINKS = ((64, 65536), (8, 32768), (2, 16384))
_NVLS_TREE_SHRINKS = ((16, 131072), (4, 65536), (1, 32768))
_FAR_UNITS, _FAR_BYTES = 4, 65536


def pieces(place: Placement, entry: Entry, nbytes: float, channels: int, most: int) -> int:
    """Return how many chunks of a message follow each other on a channel, at most `most`."""
    if entry.algorithm == "ring" and entry.protocol != "simple":
        # Their flags come with every line of 8 or 128 bytes, so ranks pass lines on, not chunks.
        return most
    chunk = float(STEP_BYTES[entry.protocol])
    share = nbytes / max(1, channels)
    if entry.algorithm in ("nvls", "nvls_tree"):
        heads = min(place.per_unit, fixed().max_nvls_heads)
        share /= heads
        chunk = _nvls_bytes(place, entry, share)
    elif entry.algorithm == "tree" and entry.protocol == "ll128":
        hops = 1 + place.units.bit_length() - 1 + 0.1 * place.per_unit
        for times, least in ((64, 131072), (16, 32768)):
            while share / chunk < hops * times / place.per_unit and chunk > least:
                chunk /= 2
    return max(1, min(most, round(share / chunk)))


def _nvls_bytes(place: Placement, entry: Entry, share: float) -> float:
    """Return the chunk of one head."""
    if entry.algorithm == "nvls":
        chunk, shrinks = NVLS_BYTES, _NVLS_SHRINKS
    else:
        chunk = _FAR_BYTES if place.units >= _FAR_UNITS else NVLS_BYTES
        shrinks = _NVLS_TREE_SHRINKS
    for times, smaller in shrinks:
        if share < times * chunk and chunk > smaller:
            chunk = smaller
    return float(chunk)
