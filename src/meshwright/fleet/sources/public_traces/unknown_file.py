"""What is said of a table that no reader knows: its columns, and what the nearest kinds need."""

from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.public_traces.mapped_jobs import list_missing_columns, map_columns
from meshwright.fleet.sources.public_traces.public_trace_source import TRACE_FORMATS
from meshwright.fleet.sources.public_traces.trace_files import find_tables
from meshwright.fleet.tables import PRIMARY_KEYS

_MOST_COLUMNS = 12
_KINDS_SHOWN = 2


def describe_unknown_table(path: Path) -> Problem | None:
    """Return what a table lacks to be read; None where a file is no table at all."""
    try:
        part = next(iter(find_tables(path)), None)
    except InputError as error:
        return error.problems[0]
    if part is None and path.is_file():
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return Problem(str(path), "is UTF-16 text", "save it as UTF-8")
        if b"\0" in head and b"," in head and b"\n" in head:
            return Problem(str(path), "is a table with NUL bytes in it", "remove them")
    if part is None or len(part.columns) < 2:
        return None
    shown = ", ".join(part.columns[:_MOST_COLUMNS])
    more = f", … ({len(part.columns):,})" if len(part.columns) > _MOST_COLUMNS else ""
    what = f"has the columns {shown}{more}, which are of no kind that is known"
    lacking = [f"{kind} needs {', '.join(names)} too" for kind, names in _nearest(part.columns)]
    mapped = map_columns(part.columns, {})
    missing = list_missing_columns(mapped)
    if not missing:
        pair = f"gpus={mapped['gpus']}"
        hint = f"--column {pair} reads it as a list of jobs"
    else:
        ours = missing[0].partition(" ")[0]
        hint = (
            f"--column {ours}=NAME maps columns of a list of jobs (it needs {'; '.join(missing)})"
        )
    return Problem(part.label, what, "; ".join([hint, *lacking]))


def _nearest(columns: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Return the kinds that share most columns with a table, and what it lacks of each."""
    names = set(columns)
    kinds = {form.name: form.required_columns for form in TRACE_FORMATS if form.read_block}
    kinds |= {f"{table}.csv": frozenset(keys) for table, keys in PRIMARY_KEYS.items()}
    shared = {
        kind: len(needed & names) / len(needed) for kind, needed in kinds.items() if needed & names
    }
    best = sorted(shared, key=lambda kind: -shared[kind])[:_KINDS_SHOWN]
    return [(kind, sorted(kinds[kind] - names)) for kind in best if kinds[kind] - names]
