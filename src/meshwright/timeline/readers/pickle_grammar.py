"""Tells the pickles of strangers that Python's own unpickler may read, by their bytes alone.

Such a file is made of opcodes that push integers, words and constants, fill lists and dicts, and
pair two words; nothing in it imports, calls, or builds anything else. All of these are checked
before a single one is carried out:

    keys      the memo holds words, lists and dicts only; a pair is made of two values of the memo
              and never kept there. So no key is nested, and none but integers of 64 bits has a hash
              that a writer could choose
    memory    the memo's numbers are no larger than the file, and containers are few
    the rest  lengths lie within the file, and STOP is its last byte

Whatever does not fit is left to the interpreter in `plain_pickle`, which says what is wrong.
"""

import re

_KEEPS = (b"q", b"r", b"\x94")  # BINPUT, LONG_BINPUT, MEMOIZE
_KEPT = rb"(?![qr\x94])"
_FRAME, _SHORT_WORD, _WORD, _STOP = 0x95, 0x8C, 0x58, 0x2E


def is_plain(raw: bytes, most_containers: int) -> bool:
    """Tell whether all opcodes of a pickle are of the plain ones, and bounded as they must be."""
    containers = raw.count(b"]") + raw.count(b"}") + raw.count(b"\x86")  # in words too: no fewer
    if raw[:1] != b"\x80" or not 2 <= raw[1] <= 5 or containers > most_containers:
        return False
    run, at, last = _run(len(raw)), 2, len(raw) - 1
    while at <= last:
        found = run.match(raw, at)
        at = found.end() if found else at
        if at > last:
            return False
        code = raw[at]
        if code == _WORD:
            at += 5 + int.from_bytes(raw[at + 1 : at + 5], "little")
        elif code == _SHORT_WORD and at < last:
            at += 2 + raw[at + 1]
        elif code == _FRAME and raw[at + 9 : at + 10] not in _KEEPS:
            at += 9
        else:
            return code == _STOP and at == last
    return False


def _run(num_bytes: int) -> re.Pattern[bytes]:
    """The opcodes whose length is fixed, one after another; the memo's numbers bounded."""
    third, fourth = (num_bytes >> 16) & 0xFF, num_bytes >> 24
    number = rb"..[\x00-%b][\x00-%b]" % (
        re.escape(bytes([third if not fourth else 0xFF])),
        re.escape(bytes([fourth])),
    )
    parts = (
        rb"(?:h.|j....)(?:h.|j....)\x86" + _KEPT,  # two of the memo, TUPLE2
        rb"[hq].", rb"j....", rb"r" + number, rb"\x94",
        rb"[(\]}eaus]",  # MARK, EMPTY_LIST, EMPTY_DICT, APPENDS, APPEND, SETITEMS, SETITEM
        rb"(?:K.|M..|J....|[N\x88\x89]|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))" + _KEPT,
    )  # fmt: skip
    return re.compile(rb"(?:" + rb"|".join(parts) + rb")*+", re.DOTALL)
