"""An explanation of NCCL's choice in plain words with figures. It computes nothing new."""

from meshwright.predict.network.explain.algorithm_table import AlgorithmCandidate, format_algorithm
from meshwright.predict.network.explain.availability import UnavailableAlgorithm
from meshwright.predict.network.explain.explanation import (
    ChoiceMargin,
    ChoiceSegment,
    EstimateBreakdown,
    NcclExplanation,
    NcclSizeExplanation,
)
from meshwright.spec.units import format_bytes

_CAPS = {
    "ll_max": "its cap on LL, over all channels",
    "ring_ll128": "its cap on a ring's channel with LL128",
    "tree_ll128": "its cap on a tree's channel with LL128",
    "tree": "its cap on a tree's channel",
    "nvls_tree": "its cap on a channel of NVLSTree",
}


def format_explanation(found: NcclExplanation) -> tuple[str, ...]:
    """Say what NCCL picks over all sizes: the summary, each segment's reason, what is not there."""
    who = _who(found.op, found.ranks, found.domains, found.nccl)
    if not found.segments:
        return (f"{who} sends nothing.",)
    if found.segments[0].estimate is None:
        return (f"{who} has no choice: send and receive kernels, {_channels_by_size(found)}.",)
    picks = ", then ".join(_pick(segment) for segment in found.segments)
    reasons = _reasons(found.segments)
    return (f"{who} picks {picks}.", *reasons, *_missing(found.unavailable), *found.notes)


def format_size_explanation(found: NcclSizeExplanation) -> tuple[str, ...]:
    """Say what NCCL picks at one size, by how much, and where our prediction disagrees."""
    duel, fastest = found.choice_margin, found.fastest
    winner = duel.winner
    who = _who(found.op, found.ranks, found.domains, found.nccl)
    on = f"on {_channels(winner.channels)}"
    lines = [f"{who} picks {winner.title} {on} for {format_bytes(found.nbytes)}. {_contest(duel)}"]
    if fastest.title != winner.title:
        gain = 1 - fastest.predicted_us / winner.predicted_us
        lines.append(
            f"We predict {_us(winner.predicted_us)} for it and {_us(fastest.predicted_us)} "
            f"({gain:.0%} less) for {fastest.title}: a tuner file can ask for that."
        )
    else:
        lines.append(f"We predict {_us(winner.predicted_us)}, the least of all.")
    return (*lines, *_missing(found.unavailable))


def format_table(found: NcclSizeExplanation) -> tuple[tuple[str, ...], ...]:
    """Return the cost table of one size as rows of text, the heading first."""
    heading = ("choice", "channels", "NCCL's estimate", "latency", "bytes", "predicted", "")
    best = found.fastest
    rows: list[tuple[str, ...]] = [heading]
    for index, item in enumerate(found.candidates):
        marks = ["NCCL's choice"] * (index == 0) + ["predicted fastest"] * (item == best)
        figures = (item.nccl_us, item.latency_us, item.stream_us, item.predicted_us)
        texts = tuple(_us(figure) for figure in figures)
        rows.append((item.title, str(item.channels), *texts, ", ".join(marks)))
    rows += [
        (format_algorithm(item.algorithm, item.protocol), "", "", "", "", "", item.reason)
        for item in found.unavailable
    ]
    return tuple(rows)


def _who(op: str, ranks: int, units: int, nccl: str) -> str:
    group = f"{ranks} ranks in " + ("one node" if units == 1 else f"{units} nodes")
    return f"NCCL {nccl}, {op} over {'one rank' if ranks == 1 else group},"


def _pick(segment: ChoiceSegment) -> str:
    name = format_algorithm(segment.algorithm, segment.protocol)
    few, many = segment.channels
    on = f"on {_channels(many)}" if few == many else f"on {few} to {_channels(many)}"
    upto = "" if segment.end_bytes is None else f" up to {_size(segment.end_bytes)}"
    return f"{name}{upto} {on}"


def _reasons(segments: tuple[ChoiceSegment, ...]) -> list[str]:
    """Return one line a segment: what it is made of, said once, and what it wins by.

    A segment's end is the next one's start, so only the last end is told.
    """
    told: set[str] = set()
    lines = []
    for before, segment in zip((None, *segments[:-1]), segments, strict=True):
        assert segment.estimate is not None
        name = format_algorithm(segment.algorithm, segment.protocol)
        inside = "over ranks" if segment.algorithm == "pat" else "inside a node"
        parts = f" ({_latency(segment.estimate, inside)}; {_bandwidth(segment.estimate)})"
        first, last = segment.margins
        line = f"{name}{'' if name in told else parts} from {_size(first.nbytes)}: "
        line += _contest(first, _stepped(before, segment))
        if segment.end_bytes is None and last.nbytes > first.nbytes:
            line += f" At {_size(last.nbytes)}: {_contest(last)}"
        lines.append(line)
        told.add(name)
    return lines


def _stepped(before: ChoiceSegment | None, segment: ChoiceSegment) -> str:
    """Say that a tree's factor, which NCCL steps at powers of two, moved the choice."""
    start = segment.start_bytes
    trees = before is not None and "tree" in (before.algorithm, segment.algorithm)
    if trees and start >= 64 and start & (start - 1) == 0:
        return f"NCCL's factor on tree bandwidth changes at {_size(start)}; "
    return ""


def _contest(duel: ChoiceMargin, first: str = "") -> str:
    winner, other = duel.winner, duel.runner_up
    if other is None:
        return f"NCCL expects {_us(winner.nccl_us)}; nothing else is there to choose."
    head = f"NCCL expects {_us(winner.nccl_us)} against {_us(other.nccl_us)} for {other.title}"
    return f"{first}{head} ({_margin(duel.margin)}): {_because(duel, winner, other)}."


def _because(duel: ChoiceMargin, winner: AlgorithmCandidate, other: AlgorithmCandidate) -> str:
    latency = f"{_us(winner.latency_us)} against {_us(other.latency_us)}"
    stream = f"{_us(winner.stream_us)} against {_us(other.stream_us)}"
    if duel.deciding_term == "both":
        return f"latency is {latency}, bytes take {stream}"
    if duel.deciding_term == "latency":
        return f"latency decides, {latency}, while bytes take {stream}"
    return f"bandwidth decides, bytes take {stream}, while latency is {latency}"


def _latency(parts: EstimateBreakdown, inside: str) -> str:
    hops = [
        f"{count:.3g} {'hop' if count == 1 else 'hops'} {where} of {_us(each)}"
        for count, where, each in (
            (parts.intra_hops, inside, parts.intra_hop_us),
            (parts.inter_hops, "between nodes", parts.inter_hop_us),
        )
        if count
    ]
    base = [f"{_us(parts.base_us)} to start"] if parts.base_us else []
    return " + ".join([*base, *hops])


def _bandwidth(parts: EstimateBreakdown) -> str:
    graph = f"{parts.graph_channels} channels of {parts.channel_gbps:g} GB/s"
    if not parts.cap:
        return f"{parts.gbps:.3g} GB/s from {graph}"
    cap = _CAPS[parts.cap]
    return f"{parts.gbps:.3g} GB/s of {parts.uncapped_gbps:.3g} from {graph}, held by {cap}"


def _missing(items: tuple[UnavailableAlgorithm, ...]) -> tuple[str, ...]:
    """Return one line of what NCCL does not consider; reasons that several share come once."""
    whys: dict[str, list[str]] = {}
    for item in items:
        if not item.protocol:
            whys.setdefault(item.reason, []).append(format_algorithm(item.algorithm, ""))
    parts = [f"{', '.join(names)}: {why}" for why, names in whys.items()]
    return (f"Not considered. {'; '.join(parts)}.",) if parts else ()


def _channels_by_size(found: NcclExplanation) -> str:
    return ", then ".join(
        _channels(segment.channels[0])
        + ("" if segment.end_bytes is None else f" up to {_size(segment.end_bytes)}")
        for segment in found.segments
    )


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def _margin(margin: float) -> str:
    return "level" if margin < 0.005 else f"{margin:.0%} more"


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs" if microseconds < 1000 else f"{microseconds / 1000:,.2f} ms"


def _size(nbytes: int) -> str:
    # Ranges end one byte below a round size, which is what a reader looks for.
    return format_bytes(nbytes + 1 if nbytes & (nbytes + 1) == 0 and nbytes > 1 else nbytes)
