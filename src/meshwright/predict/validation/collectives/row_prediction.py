"""What a row measured, priced: NCCL's collectives, experts' exchanges, raw RDMA.

Benchmarks spell a collective in many ways, and some are none of NCCL's. Each gets the nearest fair
prediction, which says what it assumes.
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from meshwright.predict.collective import simulate_nccl_us
from meshwright.predict.network import (
    ExpertTraffic,
    NcclOp,
    Placement,
    bus_factor,
    predict_collective,
    predict_expert_dispatch,
)
from meshwright.predict.network.expert_dispatch import DispatcherKind, expected_distinct, message_s
from meshwright.predict.network.nccl_constants import ALGORITHMS, DEFAULT_NCCL
from meshwright.predict.validation.collectives.row_fields import (
    UnreadableRowError,
    read_measurement,
    read_size_bytes,
    read_text,
)
from meshwright.predict.validation.collectives.sweep_rows import Row

PredictionMethod = Literal["formula", "simulation"]
"""How NCCL's collectives are predicted: in closed form, or move by move."""

_SPELLINGS: dict[str, NcclOp] = {
    **{name.replace("_", ""): name for name in get_args(NcclOp)},
    "alltoallv": "all_to_all",
    "bcast": "broadcast",
    "p2p": "send_recv",
}
# The benchmark that expert-parallel libraries copy from DeepEP (its README, "Performance"): tokens
# per rank, of the low-latency kernels too, hidden size, experts per token.
TOKENS, LOW_LATENCY_TOKENS, HIDDEN, TOP_K = 4096, 128, 7168, 8
# It searches for the best number of tokens in a message; DeepEP's own choice over 24 to 64 ranks
# (`get_dispatch_config`) stands for what it finds.
MESSAGE_TOKENS = 8
# One float32 scale for 128 values of fp8.
FP8_BYTES, BF16_BYTES = 1 + 4 / 128, 2.0


class CollectivePrediction(NamedTuple):
    """A prediction beside what was measured."""

    predicted_us: float
    measured_us: float | None
    algorithm: str
    protocol: str
    assumed: tuple[str, ...]


def normalize_op(name: str) -> NcclOp | None:
    """Return NCCL's collective under any of its spellings: AllReduce, all_reduce_perf, bcast."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("perf")
    return _SPELLINGS.get(plain)


def predict_row(
    row: Row, place: Placement, by: PredictionMethod = "formula"
) -> CollectivePrediction:
    """Predict what a row measured on a group; what NCCL does not have is always a formula."""
    name = read_text(row, "collective")
    op = normalize_op(name)
    if op is not None:
        return _collective(row, place, op, by)
    for start, price in _OTHERS.items():
        if name.startswith(start):
            return price(row, place)
    known = ", ".join((*get_args(NcclOp), *_OTHERS))
    raise UnreadableRowError(f"{name!r:.40} is no collective that is known: {known}")


def get_nccl_version(row: Row) -> str:
    """Return the NCCL version to predict with: the row's, else the one most runs report."""
    found = re.search(r"2\.\d+", read_text(row, "nccl_version"))
    return found[0] if found else DEFAULT_NCCL


def get_allowed_algorithms(row: Row) -> tuple[str, ...] | None:
    """Return the algorithms that a run was restricted to, where its row says so."""
    text = read_text(row, "algo").lower()
    if "nvls_enable=0" in text:
        return ("ring",)
    forced = re.search(r"nccl_algo=(\w+)", text)
    return (forced[1],) if forced and forced[1] in ALGORITHMS else None


def measured_us(row: Row, op: NcclOp, ranks: int) -> float | None:
    """Return the measured time, from a bandwidth where the row states no time."""
    time_us = read_measurement(row, "time_us")
    if time_us is not None:
        return time_us
    for name, factor in (("busbw_GBps", bus_factor(op, ranks)), ("algbw_GBps", 1.0)):
        gbps = read_measurement(row, name)
        if gbps is not None:
            return read_size_bytes(row) * factor / (gbps * 1e3)
    return None


def _collective(
    row: Row, place: Placement, op: NcclOp, by: PredictionMethod
) -> CollectivePrediction:
    size, release, kept = read_size_bytes(row), get_nccl_version(row), get_allowed_algorithms(row)
    cost = predict_collective(place, op, size, nccl=release, only=kept)
    predicted_us = cost.seconds * 1e6
    if by == "simulation":
        predicted_us = simulate_nccl_us(place, op, size, nccl=release, only=kept)
    return CollectivePrediction(
        predicted_us=predicted_us,
        measured_us=measured_us(row, op, place.ranks),
        algorithm=cost.algorithm,
        protocol=cost.protocol,
        assumed=(),
    )


def _experts(row: Row, place: Placement) -> CollectivePrediction:
    """Price a dispatch or a combine as DeepEP's benchmark runs it."""
    name = read_text(row, "collective")
    direct = name.endswith("_ll")
    traffic, assumed = _traffic(row, place, low_latency=direct)
    style: DispatcherKind = "alltoall" if direct else "deepep"
    cost = predict_expert_dispatch(place, traffic, style=style, nccl=get_nccl_version(row))
    if direct:
        assumed += ("low-latency kernels as a pairwise exchange",)
    time_us = read_measurement(row, "time_us")
    gbps = read_measurement(row, "ep_bandwidth_GBps")
    if time_us is None and gbps is not None:
        # The kernels count what a rank's tokens occupy at their targets, itself among them.
        over_network = read_text(row, "ep_bandwidth_domain") == "RDMA"
        copies = expected_distinct(place.domains if over_network else place.ranks, traffic.top_k)
        if over_network and traffic.max_domains:
            copies = min(copies, float(traffic.max_domains))
        copies = float(traffic.top_k) if direct else copies
        time_us = traffic.tokens * traffic.token_bytes * copies / (gbps * 1e3)
        assumed += ("a time from the bandwidth, its bytes counted as DeepEP counts them",)
    return CollectivePrediction(
        predicted_us=cost.seconds * 1e6,
        measured_us=time_us,
        algorithm=cost.algorithm,
        protocol=cost.protocol,
        assumed=assumed,
    )


def _traffic(
    row: Row, place: Placement, *, low_latency: bool
) -> tuple[ExpertTraffic, tuple[str, ...]]:
    name, note = read_text(row, "collective"), read_text(row, "note")
    tokens = _stated(note, r"(\d+) tokens") or (LOW_LATENCY_TOKENS if low_latency else TOKENS)
    hidden = _stated(note, r"hidden (?:size )?(\d+)") or HIDDEN
    top_k = _stated(note, r"top-(\d+) experts") or TOP_K
    groups = _stated(note, r"top-(\d+) groups")
    wide = "combine" in name or "bf16" in name
    kept = f"{tokens} tokens of {hidden} per rank, {top_k} experts each"
    said = () if re.search(r"\d+ tokens", note) else (f"DeepEP's benchmark: {kept}",)
    precision = f"{'bf16' if wide else 'fp8'} tokens"
    unsaid = () if re.search(r"fp8|bf16", f"{name} {note}", re.IGNORECASE) else (precision,)
    traffic = ExpertTraffic(
        tokens=tokens,
        token_bytes=hidden * (BF16_BYTES if wide else FP8_BYTES),
        top_k=top_k,
        max_domains=min(place.domains, groups) if groups else None,
        message_tokens=MESSAGE_TOKENS,
    )
    return traffic, (*said, *unsaid)


def _stated(note: str, pattern: str) -> int | None:
    found = re.search(pattern, note)
    return int(found[1]) if found else None


def _rdma(row: Row, place: Placement) -> CollectivePrediction:
    """Price one raw transfer of an all-to-all without any collective library."""
    nbytes = read_size_bytes(row)
    time_us, gbps = read_measurement(row, "time_us"), read_measurement(row, "throughput_GBps")
    if time_us is None and gbps is not None:
        time_us = nbytes / (gbps * 1e3)
    return CollectivePrediction(
        predicted_us=message_s(place, nbytes) * 1e6,
        measured_us=time_us,
        algorithm="rdma",
        protocol="",
        assumed=("one transfer of that size along the rails, many under way",),
    )


_OTHERS: dict[str, Callable[[Row, Placement], CollectivePrediction]] = {
    "ep_dispatch": _experts,
    "ep_combine": _experts,
    "rdma_all_to_all": _rdma,
}
