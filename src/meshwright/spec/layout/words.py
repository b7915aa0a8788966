"""A layout in words: as it is given, or by its degrees alone; what is as usual goes unsaid."""

from meshwright.spec.layout.layout import Layout
from meshwright.spec.read import plain


def words_of(layout: Layout) -> str:
    """Write a layout as it is given."""
    default, found = plain(Layout()), []
    for name, value in plain(layout).items():
        if value != default.get(name):
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            found.append(f"{name}={str(text).lower() if isinstance(text, bool) else text}")
    return ",".join(found) or "one device"


def short_name(layout: Layout, between: str = " ") -> str:
    """Name a layout by its degrees."""
    return degrees_name(layout.tp, layout.pp, layout.dp, layout.ep, between=between)


def degrees_name(tp: int, pp: int, dp: int, ep: int, *, between: str = " ") -> str:
    """Name degrees, also such that no layout can have."""
    degrees = (("tp", tp), ("pp", pp), ("dp", dp), ("ep", ep))
    return between.join(f"{name} {value}" for name, value in degrees if value > 1) or "1 GPU"
