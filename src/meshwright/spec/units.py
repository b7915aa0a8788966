"""Counts, sizes, times and rates: read from what people type, printed with three digits.

`k M G T` (and `B` for a count) are powers of 1000, `Ki Mi Gi Ti` powers of 1024, so `16k` is
16,000 and `16Ki` is 16,384. Everything inside the project is SI: bytes, seconds, FLOPs.
"""

import math
import re
from collections.abc import Iterable
from decimal import Decimal

from meshwright.errors import InputError, Problem

# A comma stands only between groups of three digits: 1,5 is a slip, not 15.
_NUMBER = re.compile(
    r"\s*([+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"\s*([^\d\s.,]*)\s*",
    re.ASCII,
)

_COUNT = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "b": 10**9,
    "t": 10**12,
    "p": 10**15,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "pi": 2**50,
}
_BYTES = {
    "": 1,
    "b": 1,
    **{unit + "b": factor for unit, factor in _COUNT.items() if unit not in {"", "b"}},
    **{unit: factor for unit, factor in _COUNT.items() if unit not in {"", "b"}},
}
_SECONDS = {
    "": 1.0,
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # the micro sign
    "μs": 1e-6,  # the Greek letter
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
    "y": 365.25 * 86400.0,
}


def _parse(
    text: str, factors: dict[str, int] | dict[str, float], what: str, where: str, example: str
) -> Decimal:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InputError([Problem(where, f"{text!r} is not a {what}", f"write it like {example}")])
    number, unit = match.groups()
    factor = factors.get(unit.lower())
    if factor is None:
        known = ", ".join(sorted(filter(None, factors)))
        raise InputError(
            [Problem(where, f"{text!r} has the unknown unit {unit!r}", f"use one of {known}")]
        )
    digits = number.replace("_", "").replace(",", "")
    if not math.isfinite(float(digits) * factor):
        raise InputError([Problem(where, f"{text!r} is too large to be a {what}", "use less")])
    # Decimal keeps every digit of a long count, which a float would round.
    return Decimal(digits) * Decimal(str(factor))


def parse_count(text: str, where: str = "") -> int:
    """Read a whole count such as `16k`, `1.5e9`, `2Ki` or `405B`."""
    value = _parse(text, _COUNT, "count", where, "4096, 16k, 16Ki or 1.5e9")
    whole = round(value)
    if value != whole:
        raise InputError([Problem(where, f"{text!r} is not a whole number", f"use {whole}")])
    return whole


def parse_number(text: str, where: str = "") -> float:
    """Read a number that need not be whole, such as `0.5`, `1.5e9` or `2k`."""
    return float(_parse(text, _COUNT, "number", where, "0.5, 1.5e9 or 2k"))


def parse_bytes(text: str, where: str = "") -> int:
    """Read a size such as `80GB`, `2GiB` or `512`; a small b would be bits, and is refused."""
    if re.search(r"[kKMGTP]i?b$", text.strip()):
        fix = f"write {text.strip()[:-1]}B for bytes"
        raise InputError([Problem(where, f"{text!r} is in bits", fix)])
    return round(_parse(text, _BYTES, "size", where, "80GB, 2GiB or 4096"))


def parse_rate(text: str, where: str = "") -> float:
    """Read bytes per second, such as `450GB/s`; `400Gb/s` and `400Gbps` are bits."""
    bits = re.fullmatch(r"(.*?)(?:b|bit)(?:/s|ps)", text.strip())
    if bits:
        return float(_parse(bits[1], _COUNT, "rate", where, "450GB/s or 400Gb/s") / 8)
    return float(parse_bytes(text.strip().removesuffix("/s"), where))


def parse_seconds(text: str, where: str = "") -> float:
    """Read a time such as `30s`, `1.5h`, `30d` or `20us`."""
    return float(_parse(text, _SECONDS, "time", where, "30s, 20us, 1.5h or 30d"))


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float, steps: tuple[str, ...], base: float, space: str) -> str:
    if not math.isfinite(value):
        return str(value)
    index = 0
    # 999.5 would print as 1,000 of the smaller unit, so it moves up already.
    while abs(value) >= base * 0.9995 and index < len(steps) - 1:
        value /= base
        index += 1
    return f"{_three_digits(value)}{space}{steps[index]}".rstrip()


def format_count(value: float) -> str:
    """Print a count with a decimal suffix: `8.03B`, `128k`."""
    return _scaled(value, ("", "k", "M", "B", "T", "P"), 1000, "")


def format_quantity(value: float, one: str, more: str = "") -> str:
    """Print a number with what it counts, in the singular where it is 1: `1 GPU`, `2.5 requests`.

    `more` is the plural, where it is not the singular with an s.
    """
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{text} {one if text == '1' else more or f'{one}s'}"


def format_bytes(value: float) -> str:
    """Print a size in binary units, as allocators and `nvidia-smi` do: `74.5 GiB`."""
    return _scaled(value, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024, " ")


def format_flops(value: float) -> str:
    """Print an amount of floating-point work: `51.4 GFLOP`."""
    return _scaled(
        value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"), 1000, " "
    )


def format_rate(value: float) -> str:
    """Print a bandwidth given in bytes per second: `450 GB/s`."""
    return _scaled(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"), 1000, " ")


def format_seconds(value: float) -> str:
    """Print a time in the unit a person would pick: `20 µs`, `4.2 s`, `31 d`."""
    if not math.isfinite(value):
        return str(value)
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        # 0.9996 s would print as 1,000 ms, so it is a second already.
        if abs(value) >= (0.9995 * seconds if unit in {"s", "ms"} else 2 * seconds):
            return f"{_three_digits(value / seconds)} {unit}"
    return f"{_three_digits(value * 1e6)} µs"


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks shortly: runs as first–last."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs
    )
