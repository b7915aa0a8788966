"""A layout in words: as it is given, or by its degrees alone; what is as usual goes unsaid."""

from meshwright.spec.layout.layout import Layout
from meshwright.spec.serialization import encode


def describe_layout(layout: Layout) -> str:
    """Write a layout as it is given."""
    default, found = encode(Layout()), []
    for name, value in encode(layout).items():
        if value != default.get(name):
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            found.append(f"{name}={str(text).lower() if isinstance(text, bool) else text}")
    return ",".join(found) or "one device"


def format_short_name(layout: Layout, between: str = " ") -> str:
    """Name a layout by its degrees."""
    return format_degrees(layout.tp, layout.pp, layout.dp, layout.ep, between=between)


def format_degrees(tp: int, pp: int, dp: int, ep: int, *, between: str = " ") -> str:
    """Name degrees, also such that no layout can have."""
    degrees = (("tp", tp), ("pp", pp), ("dp", dp), ("ep", ep))
    return between.join(f"{name} {value}" for name, value in degrees if value > 1) or "1 GPU"
