"""Messages between two ranks, the first and the last: how late they come, and how many bytes pass.

`one_way` is half of a message there and one back; `both_ways` has one each way at the same time.
"""

from meshwright.observe.bench.exchanges import Exchanges

_KIB, _MIB = 1 << 10, 1 << 20

MESSAGES = Exchanges(
    name="messages",
    title="messages between two ranks",
    ops=("one_way", "both_ways"),
    on_gpu={
        "full": (8, _KIB, 32 * _KIB, _MIB, 32 * _MIB, 512 * _MIB),
        "quick": (8, 32 * _KIB, 64 * _MIB),
    },
    on_host={
        "full": (8, _KIB, 32 * _KIB, _MIB, 16 * _MIB, 64 * _MIB),
        "quick": (8, 32 * _KIB, 16 * _MIB),
    },
    usual_s={"quick": 1.5, "full": 6.0},
)
