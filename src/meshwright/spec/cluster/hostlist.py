"""Host lists as Slurm writes them: `n[01-16,20],login1` to names and back.

Brackets hold numbers and ranges, keep leading zeros, may stand anywhere and several times in a
name, and may hold brackets themselves. Nothing here knows what the names are for.
"""

import re
from itertools import product

from meshwright.errors import InputError, Problem

MAX_HOSTS = 1_000_000
"""A list that grows beyond this is taken for a mistake."""

_RANGE = re.compile(r"(\d+)-(\d+)")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")

_LONGEST_RANGE = 64


def expand_hostlist(text: str, where: str = "hosts") -> tuple[str, ...]:
    """Return every name of a host list, in its order."""
    names: list[str] = []
    for part in _split(text, where):
        if not part:
            what = f"{_short(text)} has an empty entry"
            raise InputError([Problem(where, what, "leave out the extra comma")])
        names.extend(_entry(part, where))
        if len(names) > MAX_HOSTS:
            raise _too_many(text, where)
    return tuple(names)


def collapse_hostlist(names: tuple[str, ...] | list[str]) -> str:
    """Write names as a host list that `expand_hostlist` turns back into them, in the same order."""
    parts: list[str] = []
    index = 0
    while index < len(names):
        match = _NUMBERED.fullmatch(names[index])
        if match is None:
            parts.append(names[index])
            index += 1
            continue
        before, _, after = match.groups()
        numbers: list[str] = []
        while index < len(names):
            following = _NUMBERED.fullmatch(names[index])
            if following is None or (following[1], following[3]) != (before, after):
                break
            numbers.append(following[2])
            index += 1
        inside = ",".join(_runs(numbers))
        parts.append(
            f"{before}{inside}{after}" if len(numbers) == 1 else f"{before}[{inside}]{after}"
        )
    return ",".join(parts)


def _runs(numbers: list[str]) -> list[str]:
    """Join numbers that follow each other with the same width into ranges."""
    runs: list[list[str]] = []
    for number in numbers:
        last = runs[-1][-1] if runs else None
        if last is not None and _next(last) == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _next(number: str) -> str:
    return str(int(number) + 1).zfill(len(number))


def _split(text: str, where: str) -> list[str]:
    """Cut at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            what = f"{_short(text)} closes a bracket it did not open"
            raise InputError([Problem(where, what, "add [ or leave out ]")])
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    if depth:
        raise InputError([Problem(where, f"{_short(text)} does not close a bracket", "add ]")])
    parts.append(text[start:].strip())
    return parts


def _entry(text: str, where: str) -> list[str]:
    pieces: list[list[str]] = []
    count = 1
    start = 0
    while start < len(text):
        if text[start] != "[":
            end = text.find("[", start)
            end = len(text) if end < 0 else end
            pieces.append([text[start:end]])
        else:
            end = _closing(text, start) + 1
            pieces.append(_inside(text[start + 1 : end - 1], where))
            count *= len(pieces[-1])
        if count > MAX_HOSTS:
            raise _too_many(text, where)
        start = end
    return ["".join(parts) for parts in product(*pieces)]


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "[") - (text[index] == "]")
        if depth == 0:
            return index
    raise AssertionError("brackets were matched before")


def _inside(text: str, where: str) -> list[str]:
    """Return what stands in one pair of brackets: numbers, ranges, and further host lists."""
    found: list[str] = []
    for part in _split(text, where):
        span = _RANGE.fullmatch(part)
        if span is None:
            if not part or ("[" not in part and not part.isdigit()):
                what = f"[{_short(text)[1:-1]}] holds {part!r}"
                raise InputError([Problem(where, what, "use numbers and ranges such as 01-16")])
            found.extend(_entry(part, where))
            continue
        first, last = span.groups()
        if len(part) > _LONGEST_RANGE:
            what = f"the range {_short(part)} has {len(part):,} characters"
            raise InputError([Problem(where, what, "use numbers such as 01-16")])
        if int(first) > int(last):
            fix = f"write {last}-{first}"
            raise InputError([Problem(where, f"the range {_short(part)} is backwards", fix)])
        if int(last) - int(first) >= MAX_HOSTS:
            raise _too_many(part, where)
        # Slurm pads to the width of the first number.
        found.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return found


def _too_many(text: str, where: str) -> InputError:
    what = f"{_short(text)} names over {MAX_HOSTS:,} hosts"
    return InputError([Problem(where, what, "shorten the ranges")])


def _short(text: str) -> str:
    return repr(text if len(text) <= 50 else text[:49] + "…")
