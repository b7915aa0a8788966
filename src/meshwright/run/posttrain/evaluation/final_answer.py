r"""What an answer comes to: the part that it marks as its end, and the number or choice in it.

    extract_final_number("So 6 · 7 = 42. #### 42")        42
    extract_final_number(r"thus \boxed{\frac{1}{2}}")     1/2
    extract_final_number("that makes 1,250 in all.")      1250

Answers mark their end as GSM8K's solutions do, by `####`, or as those of MATH, by `\boxed{…}`; the
mark that comes last counts. Everything is exact: numbers are fractions, and none is rounded. It
imports the standard library alone, for it runs in the processes of verifiers too.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

_HASHES = "####"
_BOXES = (r"\boxed", r"\fbox")
_THOUGHT = "</think>"
_DIGITS = 400
"""Of the longest number that is read: beyond it, what a model wrote is no answer."""
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?|\.\d+"
_NUMBER = re.compile(
    # A minus behind a digit or a letter is a dash, or takes something off.
    rf"(?P<sign>(?<![\w)}}])[-−+]\s?\$?)?"
    rf"(?:\\[dt]?frac\{{(?P<top>{_PLAIN})\}}\{{(?P<bottom>{_PLAIN})\}}"
    rf"|(?P<whole>{_PLAIN})(?:\s?/\s?(?P<over>\d+))?)"
)
_SAID = re.compile(r"\banswer\b(?:\s+is\b)?\s*[:=]?\s*(?P<rest>[^\n]+)", re.IGNORECASE)
_LETTER = re.compile(r"\(?(?P<letter>[A-Za-z])(?:[).:]|\s*$)")
_EDGES = " \t\n.,;:!?\"'`*$"


def strip_reasoning(text: str) -> str:
    """Return what follows the thoughts of an answer, or all of it where none are marked."""
    return text.rpartition(_THOUGHT)[2]


def extract_marked_answer(text: str) -> str | None:
    r"""Return what stands behind the last `####` or within the last `\boxed{…}`; None without."""
    hashes = text.rfind(_HASHES)
    box = max(text.rfind(each) for each in _BOXES)
    if hashes < 0 and box < 0:
        return None
    if hashes > box:
        return text[hashes + len(_HASHES) :].strip().partition("\n")[0].strip()
    return _within(text, box)


def _within(text: str, box: int) -> str | None:
    """Return what the braces of a box hold; None where they are not closed."""
    begin = text.find("{", box)
    if begin < 0:
        return None
    deep = 0
    for place in range(begin, len(text)):
        deep += {"{": 1, "}": -1}.get(text[place], 0)
        if not deep:
            return text[begin + 1 : place].strip()
    return None


def extract_final_number(text: str, *, only_marked: bool = False) -> Fraction | None:
    """Return the number that an answer comes to: the marked one, or the last that it names.

    With `only_marked` an answer without a mark has none.
    """
    text = strip_reasoning(text)
    found = extract_marked_answer(text)
    if found is not None:
        numbers = _numbers(found)
        # Behind hashes the number comes first, then perhaps its unit; a box may hold an equation.
        first = text.rfind(_HASHES) > max(text.rfind(each) for each in _BOXES)
        return None if not numbers else numbers[0 if first else -1]
    if only_marked:
        return None
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Fraction]:
    read = (_value(each) for each in _NUMBER.finditer(text))
    return [each for each in read if each is not None]


def _value(found: re.Match[str]) -> Fraction | None:
    parts = [(found[name] or "").replace(",", "") for name in ("top", "bottom", "whole", "over")]
    if max(map(len, parts)) > _DIGITS:
        return None
    top, bottom, whole, over = (Fraction(each) if each else None for each in parts)
    value, below = (top, bottom) if whole is None else (whole, over)
    if value is None or below == 0:
        return None
    if below is not None:
        value /= below
    return -value if (found["sign"] or "+")[0] in "-−" else value


def extract_final_choice(text: str, choices: Sequence[str]) -> int | None:
    """Return which choice an answer comes to, by its text or its letter; None where by neither.

    Letters are a, b, c in the order of the choices. What is looked at is the marked part, else what
    follows the last "answer is" or "answer:", else the last line.
    """
    part = _end(strip_reasoning(text))
    words = [_plain(each) for each in choices]
    if _plain(part) in words:
        return words.index(_plain(part))
    letter = _LETTER.match(part.strip(_EDGES))
    if letter is None:
        return None
    number = ord(letter["letter"].lower()) - ord("a")
    return number if number < len(choices) else None


def _end(text: str) -> str:
    found = extract_marked_answer(text)
    if found is not None:
        return found
    said = list(_SAID.finditer(text))
    if said:
        return said[-1]["rest"].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(_EDGES).split())
