"""Which matrix products one rank runs for some weights, after tensor and expert parallelism."""

from functools import lru_cache
from typing import NamedTuple

from meshwright.spec.model import Weight

_JOINED = {
    "k": "q",
    "v": "q",
    "up": "gate",
    "shared_up": "shared_gate",
    "expert_up": "expert_gate",
}
"""Weights that read the same input as another, which software runs as one product."""


class RankGemm(NamedTuple):
    """One product on one rank."""

    out_features: int
    in_features: int
    weight: Weight
    """The weight, or the first of those run together."""


def list_rank_gemms(weights: tuple[Weight, ...], tp: int, *, apart: bool = False) -> list[RankGemm]:
    """Return each product of a rank; those with one input together, unless they are kept `apart`.

    Routers have kernels of their own and are left out.
    """
    found: list[RankGemm] = []
    for weight in weights:
        if weight.part == "router":
            continue
        shards = weight.count_shards(tp)
        out = weight.fan_out // shards if weight.split == "column" else weight.fan_out
        into = weight.fan_in // shards if weight.split == "row" else weight.fan_in
        last = found[-1] if found and not apart else None
        if last is not None and _JOINED.get(weight.name) == last.weight.name:
            found[-1] = RankGemm(last.out_features + out, into, last.weight)
        else:
            found.append(RankGemm(out, into, weight))
    return found


@lru_cache(maxsize=4096)
def list_dense_gemms(weights: tuple[Weight, ...], tp: int) -> tuple[RankGemm, ...]:
    """Return the products of a rank without those of routed experts."""
    return tuple(list_rank_gemms(tuple(w for w in weights if w.part != "expert"), tp))
