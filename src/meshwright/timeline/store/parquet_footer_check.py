"""Checks a Parquet footer before Arrow sees it, and leaves out what Arrow cannot be asked about.

Python's view of a column's metadata is made by C++ code that throws where the footer contradicts
itself: a column of another type than the schema says, or statistics of the wrong length. Nothing
catches that, and the whole process ends. Reading the rows reports such faults as errors.
"""

from collections.abc import Sequence

from meshwright.timeline.store.parquet_footer import Fields, InvalidFooter

_LIST, _STRUCT = 9, 12
_SCHEMA, _ROW_GROUPS, _GROUP_COLUMNS, _CHUNK_META = 2, 4, 1, 3
_ELEMENT_TYPE, _ELEMENT_NAME, _ELEMENT_CHILDREN = 1, 4, 5
_CHUNK_ENCRYPTION = (8, 9)
_META_TYPE, _META_PATH, _META_STATISTICS = 1, 3, 12
_META_LEFT_OUT = (16, 17)
"""Histograms of sizes, and statistics of geography."""
_LIMITS = (1, 2, 5, 6)
"""Largest and smallest value in `Statistics`, in the old order of bytes and the new."""
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by physical type; texts have any."""


def make_safe_footer(fields: Fields) -> Fields:
    """Return the footer without what Arrow may end the process over; raise where nothing helps."""
    try:
        leaves = _leaf_types(fields[_SCHEMA][1][1])
        groups = [_safe_group(group, leaves) for group in fields[_ROW_GROUPS][1][1]]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidFooter(f"a column contradicts the schema: {error}") from error
    return {**fields, _ROW_GROUPS: (_LIST, (_STRUCT, groups))}


def _leaf_types(elements: Sequence[Fields]) -> list[int]:
    """Return the physical types of the columns that hold values, in order."""
    found: list[int] = []
    for element in elements[1:]:
        element[_ELEMENT_NAME][1].decode()
        if _ELEMENT_CHILDREN not in element:
            found.append(element[_ELEMENT_TYPE][1])
        elif element[_ELEMENT_CHILDREN][1] < 1:
            raise InvalidFooter("a group of columns has no columns")
    return found


def _safe_group(group: Fields, leaves: list[int]) -> Fields:
    chunks: list[Fields] = group[_GROUP_COLUMNS][1][1]
    if len(chunks) != len(leaves):
        raise InvalidFooter(f"a row group has {len(chunks)} columns, and the schema {len(leaves)}")
    safe = [_safe_chunk(chunk, leaf) for chunk, leaf in zip(chunks, leaves, strict=True)]
    return {**group, _GROUP_COLUMNS: (_LIST, (_STRUCT, safe))}


def _safe_chunk(chunk: Fields, leaf: int) -> Fields:
    kind, meta = chunk[_CHUNK_META]
    if meta[_META_TYPE][1] != leaf or any(number in chunk for number in _CHUNK_ENCRYPTION):
        raise InvalidFooter("a column is encrypted, or of another type than the schema says")
    for part in meta[_META_PATH][1][1]:
        part.decode()
    kept = {number: value for number, value in meta.items() if number not in _META_LEFT_OUT}
    if _META_STATISTICS in kept:
        said = kept[_META_STATISTICS][1]
        width = _WIDTHS.get(leaf)
        if any(width not in (None, len(said[number][1])) for number in _LIMITS if number in said):
            said = {number: value for number, value in said.items() if number not in _LIMITS}
        kept[_META_STATISTICS] = (_STRUCT, said)
    return {**chunk, _CHUNK_META: (kind, kept)}
