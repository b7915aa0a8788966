"""What Slurm counts: trackable resources (`cpu=8,mem=2000M,gres/gpu:a100=4`), gres, sizes, spans.

A cluster that counts GPUs by type prints them twice, `gres/gpu=4,gres/gpu:a100=4`: the same four.
"""

import re
from typing import Final, NamedTuple

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)(?:i?B)?([nc]?)", re.IGNORECASE)
_SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_DAYS_HOURS = re.compile(r"(\d+)-(\d+)")
_MIG = re.compile(r"(?:^|[_.\-])(\d)g\.(\d+)gb")
MIB: Final = 1 << 20


class Tres(NamedTuple):
    """Resources that a job asked for or was given; None: not told."""

    cpus: float | None = None
    memory_bytes: float | None = None
    """Bytes, over all nodes."""
    nodes: int | None = None
    gpus: float | None = None
    """Whole ones; an instance of a GPU that is cut up (MIG) counts as its part."""
    gpu_kind: str | None = None


class Gres(NamedTuple):
    """One entry of a list of generic resources, such as `gpu:a100:4(IDX:0-3)`."""

    name: str
    kind: str | None
    quantity: int
    detail: str
    """What stands in brackets."""


def parse_tres(text: str) -> Tres:
    """Read a list of trackable resources; an empty one tells nothing.

    A list that names no GPU counts none, except where the job holds shards, whose part of a GPU
    the list does not tell.
    """
    if not text:
        return Tres()
    cpus = memory = nodes = plain = None
    kinds: dict[str, float] = {}
    shards = False
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key == "cpu":
            cpus = _number(value)
        elif key == "mem":
            memory = parse_size_bytes(value, bare=MIB)
        elif key == "node":
            nodes = _number(value)
        elif key == "gres/gpu":
            plain = _number(value)
        elif key.startswith("gres/gpu:"):
            kinds[key[9:]] = _number(value) or 0.0
        elif key.startswith("gres/shard"):
            shards = True
    gpus = _gpus(plain, kinds)
    if gpus is None and not shards:
        gpus = 0.0
    return Tres(cpus, memory, None if nodes is None else int(nodes), gpus, _kind(kinds))


def _gpus(plain: float | None, kinds: dict[str, float]) -> float | None:
    if plain is None and not kinds:
        return None
    # What is counted by type is counted again without; only the rest is more.
    rest = max(0.0, (plain or 0.0) - sum(kinds.values()))
    return rest + sum(count * parse_gpu_fraction(kind) for kind, count in kinds.items())


def _kind(kinds: dict[str, float]) -> str | None:
    held = {kind: count for kind, count in kinds.items() if count}
    return max(held, key=lambda kind: (held[kind], kind)) if held else None


def parse_gpu_fraction(kind: str | None) -> float:
    """Return which part of a GPU one of this type is: 1, or less of a MIG profile like `1g.5gb`.

    NVIDIA cuts a GPU into seven slices of compute, an A30 (6 GB a slice) into four.
    """
    found = _MIG.search(kind or "")
    if not found:
        return 1.0
    slices, memory = int(found[1]), int(found[2])
    return slices / (4 if memory == 6 * slices else 7)


def parse_gres(text: str) -> list[Gres]:
    """Read a list of generic resources: `gpu:a100:8`, `gpu:2(S:0-1),shard:4`, `gres/gpu:1`."""
    entries = []
    for part in re.findall(r"(?:[^,(]|\([^)]*\))+", text.strip()):
        head, _, detail = part.partition("(")
        head = head.strip().removeprefix("gres:").removeprefix("gres/").replace("=", ":")
        name, *rest = head.split(":")
        if not name or name in {"null", "N/A"}:
            continue
        count = 1
        if rest and rest[-1].isdigit():
            count = int(rest.pop())
        entries.append(Gres(name, ":".join(rest) or None, count, detail.rstrip(")")))
    return entries


def parse_gres_gpus(text: str) -> tuple[float | None, str | None]:
    """Return how many GPUs a list of generic resources has, and of which kind."""
    gpus = [entry for entry in parse_gres(text) if entry.name == "gpu"]
    if not gpus:
        return None, None
    kinds: dict[str, float] = {}
    for entry in gpus:
        if entry.kind:
            kinds[entry.kind] = kinds.get(entry.kind, 0.0) + entry.quantity
    return sum(entry.quantity * parse_gpu_fraction(entry.kind) for entry in gpus), _kind(kinds)


def parse_size_bytes(text: str, bare: int = 1) -> float | None:
    """Read a size such as `2000M`, `1.5T` or `64Gn`; a number without a unit counts in `bare`."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        return None
    unit = found[2].upper()
    return float(found[1]) * (_UNITS[unit] if unit else bare)


def parse_req_mem(text: str, nodes: float | None, cpus: float | None) -> float | None:
    """Read ReqMem: a total since Slurm 21.08, before that for each node (`n`) or core (`c`)."""
    size = parse_size_bytes(text, bare=MIB)
    if not size:
        return None
    per = {"n": nodes, "c": cpus}.get(text.strip()[-1:].lower(), 1.0)
    return None if per is None else size * per


def parse_duration_s(text: str) -> float | None:
    """Read a span such as `1-02:03:04`, `02:03`, `00:02.447` or `2-12`; None of anything else."""
    found = _SPAN.fullmatch(text)
    if found:
        days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    found = _DAYS_HOURS.fullmatch(text)
    return (int(found[1]) * 24 + int(found[2])) * 3600.0 if found else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        # Billing and counts above a thousand may carry a unit, in thousands.
        size = parse_size_bytes(text)
        return None if size is None else size
