"""How detectors word numbers and places, so that evidence reads alike everywhere."""

_NAME_LETTERS = 70


def format_duration(time_ns: float) -> str:
    """A time with three digits, in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if time_ns >= size:
            value = time_ns / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{time_ns:.0f} ns"


def format_share(part: float, whole: float) -> str:
    """A part in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def truncate_name(name: str) -> str:
    """A name cut to one line."""
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"
