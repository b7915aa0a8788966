"""`find_repeated_names`: names that stand twice in a safetensors file's header.

The library takes the last of two tensors of one name, and other readers the first: such a file has
no one meaning.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.errors import Problem

MAX_HEADER_BYTES = 100_000_000
"""What the library reads at most."""


def find_repeated_names(path: Path) -> Problem | None:
    """Return the problem of a file whose header has a name twice; None where there is none.

    What else is wrong with a header is the library's to say.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            return None
        header = file.read(size)
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        repeated.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        json.loads(header, object_pairs_hook=note)
    except (ValueError, RecursionError):
        return None
    if not repeated:
        return None
    return Problem(str(path), f"holds {repeated[0]} twice in its header", "fetch it again")
