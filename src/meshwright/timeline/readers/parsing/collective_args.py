"""What profilers tell of collectives, span by span: bytes, kind, process group, element type."""

from typing import NamedTuple

from meshwright.timeline.readers.parsing.label_encoder import Codes
from meshwright.timeline.readers.parsing.timestamps import Ints


class CollectiveColumns(NamedTuple):
    """What is known of each span's communication."""

    num_bytes: Ints
    collective: tuple[Codes, list[str]]
    group: tuple[Codes, list[str]]
    dtype: tuple[Codes, list[str]]
