"""Rewrites pickles of strangers so that Python's own unpickler may read them, by their bytes alone.

What comes out has no opcodes but those that push integers, words and constants, fill lists and
dicts, and use the memo: nothing in it imports, calls, or builds anything else. A pair of two values
of the memo becomes a list, so that no key can be nested; frames are left out. Before anything is
carried out, all of it is checked:

    keys      lists and dicts cannot be keys, and the hash of a word cannot be chosen by a writer;
              integers can be made to probe each other's places, which `safe_pickle` gives no time
    memory    the memo's numbers are no larger than a writer could count up to, containers are few
    the rest  lengths lie within the file, and STOP is its last byte

Whatever does not fit is left to the interpreter in `safe_pickle`, which says what is wrong. So is
everything under a Python whose `re` loses its place (before 3.11.5), as what it passes over would
not have been looked at.
"""

import re

_FRAME, _SHORT_WORD, _WORD, _STOP = 0x95, 0x8C, 0x58, 0x2E
_PAIR = rb"(?:h.|j....)(?:h.|j....)\x86"  # BINGET or LONG_BINGET twice, TUPLE2
_BYTES_PER_ENTRY = 5
"""LONG_BINPUT, which counts the memo up by one, takes as many."""
_KEEPS_ITS_PLACE = re.fullmatch(rb"(?:ab?c)*+", b"aca") is None
"""Whether a possessive repeat ends where its last whole turn did (python/cpython#106052)."""


def rewrite_pickle(raw: bytes, most_containers: int) -> bytes | None:
    """Return a pickle in plain opcodes alone; None where it has others, or is not bounded."""
    containers = raw.count(b"]") + raw.count(b"}") + raw.count(b"\x86")  # in words too: no fewer
    known = raw[:1] == b"\x80" and raw[1:2] in _PROTOCOLS
    if not known or containers > most_containers or not _KEEPS_ITS_PLACE:
        return None
    run, at, last = _run(len(raw) // _BYTES_PER_ENTRY), 2, len(raw) - 1
    kept, since = [], 0
    while at <= last:
        found = run.match(raw, at)
        assert found is not None, "no opcode at all is a run too"
        at, pair = found.end(), found[1]
        if pair:
            kept += [raw[since : at - len(pair)], b"](", pair[:-1], b"e"]
            since = at
            continue
        code = raw[at] if at <= last else -1
        if code == _WORD:
            at += 5 + int.from_bytes(raw[at + 1 : at + 5], "little")
        elif code == _SHORT_WORD and at < last:
            at += 2 + raw[at + 1]
        elif code == _FRAME:
            kept.append(raw[since:at])
            at += 9
            since = at
        else:
            return b"".join([*kept, raw[since:]]) if code == _STOP and at == last else None
    return None


_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")


def _run(most_entries: int) -> re.Pattern[bytes]:
    """Opcodes of fixed length, one after another, up to a pair; the memo's numbers bounded.

    The bound is rounded up to its highest byte that is not zero, or to two bytes.
    """
    third, fourth = (most_entries >> 16) & 0xFF, most_entries >> 24
    highest = [re.escape(bytes([byte])) for byte in (0xFF if fourth else third, fourth)]
    parts = (
        rb"(?!%b)h." % _PAIR,
        rb"[qK].",
        rb"[(\]}eausN\x88\x89\x94]",
        rb"M..", rb"J....", rb"(?!%b)j...." % _PAIR, rb"r..[\x00-%b][\x00-%b]" % tuple(highest),
        rb"\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})",
    )  # fmt: skip
    return re.compile(rb"(?:%b)*+(%b)?" % (rb"|".join(parts), _PAIR), re.DOTALL)
