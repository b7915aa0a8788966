"""The collectives that each rank shows, one row each, with the words made the same.

Profilers call a collective by several words (`_allgather_base`, `ncclDevKernel_AllGather_…`); here
each gets one of `COLLECTIVE_OPS`. Ranks of a group are taken from the profile where it says them.
Where it says only how many there are, and more ranks show a group of that name, it is several: who
is in which is not known, and they are left apart.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import COMMUNICATION, Ints
from meshwright.timeline.columns import DictionaryColumn
from meshwright.timeline.memo import memoize
from meshwright.timeline.readers.parsing.arrow_arrays import integers_to_numpy, take_rows
from meshwright.timeline.schema import ABSENT, TimelineSource
from meshwright.timeline.timeline import Timeline


@memoize
def read_listed_groups(part: Timeline) -> dict[str, tuple[int, ...]]:
    """The ranks of each group that a rank's profile lists, by name."""
    try:
        told = msgspec.json.decode(part.metadata.get("distributed", "{}"), type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
    rows = told.get("pg_config")
    found = {}
    for row in rows if isinstance(rows, list) else ():
        ranks = row.get("ranks") if isinstance(row, dict) else None
        if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
            found[str(row.get("pg_name"))] = tuple(ranks)
    return found


def find_layout_group_ranks(part: Timeline, label: str) -> tuple[int, ...]:
    """The ranks that a group of our own trainer has; none where the profile tells no layout."""
    text = part.metadata.get("layout", "")
    if not text or not part.ranks:
        return ()
    from meshwright.spec.layout import Layout
    from meshwright.spec.layout.ranks import get_process_group
    from meshwright.spec.serialization import decode

    try:
        layout = decode(Layout, msgspec.json.decode(text))
        return tuple(sorted(get_process_group(layout, part.ranks[0], label)))
    except (InputError, msgspec.MsgspecError):
        return ()


COLLECTIVE_OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "other",
)

_WORDS = (
    ("", r"send|recv|receive|p2p|\bmessage\b"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|dispatch|combine"),
    ("broadcast", r"broad_?cast"),
    ("barrier", r"barrier"),
    ("reduce", r"reduce"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
)

_PATTERNS = tuple((op, re.compile(pattern, re.IGNORECASE)) for op, pattern in _WORDS)


class ProcessGroupRanks(NamedTuple):
    """A process group."""

    label: str
    """Its name in the profile; empty where the profile does not say."""
    ranks: tuple[int, ...]
    """Its members: as the profile says, else those that show it."""

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class CollectiveCalls(NamedTuple):
    """Every collective of every rank, by group, then rank, then time."""

    groups: tuple[ProcessGroupRanks, ...]
    dtypes: tuple[str, ...]
    group: Ints
    rank: Ints
    row: Ints
    """Row in the rank's own timeline."""
    start_ns: Ints
    end_ns: Ints
    op: Ints
    bytes: Ints
    dtype: Ints
    sequence: Ints
    """The library's own number of the collective; -1 where it is not said."""


_RANKS = r'"Process Group Ranks":\s*"?\[?(?P<ranks>[^\]"]*)'

_SIZE = r'"Group size":\s*"?(?P<number>\d{1,9})'

_SEQUENCE = r'"Seq":\s*"?(?P<number>\d{1,18})'


def op_of(text: str) -> int:
    """Return the index in `COLLECTIVE_OPS` of a collective or kernel name; send/recv is -1."""
    for op, pattern in _PATTERNS:
        if pattern.search(text):
            return COLLECTIVE_OPS.index(op) if op else ABSENT
    return COLLECTIVE_OPS.index("other")


class _ReportedGroup(NamedTuple):
    """What a profile says of a group."""

    label: str
    ranks: tuple[int, ...]
    size: int
    """How many ranks it has; -1 where that is not said, or they are known."""


class _OfRank(NamedTuple):
    """The collectives of one rank in the order of time; groups and types by its own numbers."""

    groups: list[_ReportedGroup]
    dtypes: tuple[str, ...]
    columns: dict[str, Ints]


def find_collective_calls(timeline: Timeline, parts: Sequence[Timeline] = ()) -> CollectiveCalls:
    """List the collectives of every rank.

    `parts` are the ranks as they were read, where each still says what it alone knows. A simulated
    timeline shows one rank for many: its groups are not those of the ranks shown, so it has none to
    match.
    """
    folded = timeline.source == TimelineSource.SIMULATED and "stages" in timeline.metadata
    own = [one for part in parts or (timeline,) for one in part.split_by_rank()]
    found = [] if folded else [one for one in map(_of_rank, own) if one.columns["row"].size]
    labels: dict[_ReportedGroup, int] = {}
    dtypes: dict[str, int] = {}
    crowded = _crowded(found)
    shown: dict[int, set[int]] = {}
    for part in found:
        columns = part.columns
        rank = int(columns["rank"][0])
        names = [
            told._replace(ranks=(rank,)) if (told.label, told.size) in crowded else told
            for told in part.groups
        ]
        codes = [labels.setdefault(name, len(labels)) for name in names]
        types = [dtypes.setdefault(name, len(dtypes)) for name in part.dtypes]
        columns["group"] = np.array(codes, dtype=np.int64)[columns["group"]]
        columns["dtype"] = np.array([*types, ABSENT], dtype=np.int64)[columns["dtype"]]
        for code in np.unique(columns["group"]).tolist():
            shown.setdefault(code, set()).add(rank)
    empty = np.zeros(0, dtype=np.int64)
    joined = {
        name: np.concatenate([empty, *(part.columns[name] for part in found)])
        for name in CollectiveCalls._fields[2:]
    }
    order = np.lexsort((joined["start_ns"], joined["rank"], joined["group"]))
    groups = tuple(
        ProcessGroupRanks(told.label, told.ranks or tuple(sorted(shown.get(code, ()))))
        for told, code in labels.items()
    )
    return CollectiveCalls(
        groups, tuple(dtypes), *(joined[name][order] for name in CollectiveCalls._fields[2:])
    )


def _crowded(parts: Sequence[_OfRank]) -> set[tuple[str, int]]:
    """Names of groups that more ranks show than such a group has: several have that name."""
    counts = Counter(
        (told.label, told.size) for part in parts for told in part.groups if not told.ranks
    )
    return {name for name, number in counts.items() if 0 < name[1] < number}


def _of_rank(part: Timeline) -> _OfRank:
    spans = find_device_spans(part)
    spans = spans.take(spans.kind == COMMUNICATION)
    collective, names = part.string_column("collective"), part.string_column("name")
    by_word = np.array([op_of(value) for value in collective.values] + [0])
    by_name = np.full(len(names.values) + 1, COLLECTIVE_OPS.index("other"))
    for code in np.unique(names.codes[spans.row]).tolist():
        by_name[code] = op_of(names.values[code])
    said = collective.codes[spans.row] >= 0
    op = np.where(said, by_word[collective.codes[spans.row]], by_name[names.codes[spans.row]])
    spans, op = spans.take(op >= 0), op[op >= 0]
    row = spans.row
    numbers, sequence, groups = _groups(part, row)
    dtype = part.string_column("dtype")
    columns = {
        "group": numbers,
        "rank": part.column("rank")[row].astype(np.int64),
        "row": row,
        "start_ns": spans.start,
        "end_ns": spans.end,
        "op": op,
        "bytes": part.column("bytes")[row],
        "dtype": dtype.codes[row].astype(np.int64),
        "sequence": sequence,
    }
    return _OfRank(groups, tuple(dtype.values), columns)


def _groups(part: Timeline, row: Ints) -> tuple[Ints, Ints, list[_ReportedGroup]]:
    """Number the groups of these rows; where no group is said, kernels of one name are one."""
    label, names = part.string_column("group"), part.string_column("name")
    ranks, sequence = _arguments(part, row)
    grouped = label.codes[row] >= 0
    keys = np.column_stack(
        [
            np.where(grouped, label.codes[row], ABSENT),
            np.where(grouped, ranks.codes, ABSENT),
            np.where(grouped, ABSENT, names.codes[row]),
        ]
    )
    distinct, first, numbers = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    words = []
    for (at, of, name), place in zip(distinct.tolist(), first.tolist(), strict=True):
        if at < 0:
            words.append(_ReportedGroup(f"? {names.values[name]}", (), ABSENT))
            continue
        said = label.values[at]
        listed = (
            _numbers(ranks.values[of])
            or read_listed_groups(part).get(said)
            or find_layout_group_ranks(part, said)
        )
        words.append(
            _ReportedGroup(said, listed, ABSENT if listed else _size(part, int(row[place])))
        )
    known = {told.label: told for told in words if told.ranks}
    words = [told if told.ranks else known.get(told.label, told) for told in words]
    return numbers.reshape(-1), sequence, words


def _size(part: Timeline, row: int) -> int:
    """How many ranks the group of one call has; -1 where that is not said."""
    if "extra" not in part.spans.column_names:
        return ABSENT
    found = re.search(_SIZE, part.spans.column("extra")[row].as_py() or "")
    return int(found["number"]) if found else ABSENT


def _arguments(part: Timeline, row: Ints) -> tuple[DictionaryColumn, Ints]:
    """What the profile says of the group's ranks and the call's number, one of each per row."""
    if "extra" not in part.spans.column_names or not row.size:
        return DictionaryColumn(np.zeros(row.size, dtype=np.int64), [""]), np.full(row.size, ABSENT)
    texts = take_rows(part.spans.column("extra"), row)
    found = pc.extract_regex(texts, _RANKS)
    ranks = pc.struct_field(found, "ranks").dictionary_encode()
    number = pc.struct_field(pc.extract_regex(texts, _SEQUENCE), "number")
    sequence = integers_to_numpy(number.cast(pa.int64()))
    said = [*ranks.dictionary.to_pylist(), ""]
    codes = integers_to_numpy(ranks.indices)
    return DictionaryColumn(np.where(codes == ABSENT, len(said) - 1, codes), said), sequence


def _numbers(text: str) -> tuple[int, ...]:
    """The ranks in a list; a long list is cut short with dots and does not say who is in it."""
    return () if "..." in text else tuple(int(one) for one in re.findall(r"\d+", text))
