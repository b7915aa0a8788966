"""A layout in the words it is given in: its fields that are not as usual."""

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
