"""Pickles of strangers: plain values come back, everything else is refused, in bounds."""

import builtins
import copyreg
import gzip
import os
import pickle
import pickletools
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline.readers.safe_pickle import pickle_rewrite, safe_pickle
from meshwright.timeline.readers.safe_pickle.pickle_rewrite import rewrite_pickle
from meshwright.timeline.readers.safe_pickle.safe_pickle import load_safe_pickle, parse_pickle
from tests.counted import instructions
from tests.timeline.readers.probe_chains import integers_on_one_probe_chain

_SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
    | st.text() | st.binary()
)  # fmt: skip
_KEYS = st.text() | st.integers(-1023, 1023) | st.none()
_PLAIN = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(value=_PLAIN, protocol=st.integers(3, 5))
def test_plain_values_come_back_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_read(protocol: int) -> None:
    shared = [1, -2, 300, 2**40, 1.5, "ä\n", None, True]
    value = {"a": shared, "b": [shared, (), ("x",), ("x", 2, 3, 4)], 7: {}}
    assert parse_pickle(pickle.dumps(value, protocol)) == value


class _Calls:
    """A payload: unpickling it would call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _payloads(mark: Path) -> list[Any]:
    command = f"touch {mark}"
    touch = _Calls(os.system, command)
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    return [
        touch,
        _Calls(builtins.eval, code),
        _Calls(exec, code),
        {"entries": [touch]},
        [[{1: touch}]],
    ]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("which", range(5))
def test_a_payload_that_calls_is_refused_and_does_not_run(
    tmp_path: Path, protocol: int, which: int
) -> None:
    mark = tmp_path / "ran"
    raw = pickle.dumps(_payloads(mark)[which], protocol)
    with pytest.raises(InputError, match=r"refused: opcode (GLOBAL|STACK_GLOBAL)"):
        parse_pickle(raw)
    assert not mark.exists()
    pickle.loads(raw)  # the payload is a real one
    assert mark.exists()


@pytest.mark.parametrize(
    ("raw", "opcode"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "GLOBAL"),
        (b"(S'true'\nios\nsystem\n.", "INST"),
        (b"(S'x'\no.", "OBJ"),
        (b"\x80\x02}}b.", "BUILD"),
        (b"\x80\x02))\x81.", "NEWOBJ"),
        (b"\x80\x04)}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02NN\x93.", "STACK_GLOBAL"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x83\x01\x00.", "EXT2"),
        (b"\x80\x02\x84\x01\x00\x00\x00.", "EXT4"),
        (b"Pid\n.", "PERSID"),
        (b"\x80\x02K\x01Q.", "BINPERSID"),
        (b"\x80\x04\x8f.", "EMPTY_SET"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
    ],
)
def test_opcodes_that_reach_beyond_plain_values_are_refused_by_name(
    raw: bytes, opcode: str
) -> None:
    with pytest.raises(InputError, match=f"opcode {opcode} "):
        parse_pickle(raw)


def test_a_registered_extension_code_is_refused_too() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(InputError, match="EXT1"):
            parse_pickle(b"\x80\x02\x82\xf0(S'true'\ntR.")
    finally:
        copyreg.remove_extension("os", "system", 240)


_HUGE = struct.pack("<Q", 1 << 50)


_LONG = 300_000
_SPARSE = b"".join(b"r" + struct.pack("<I", 3 * number) for number in range(_LONG // 5))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04\x8d" + _HUGE + b"x.",
        b"\x80\x04\x8e" + _HUGE + b"x.",
        b"\x80\x05\x96" + _HUGE + b"x.",
        b"\x80\x03B\xff\xff\xff\x7fx.",
        b"X\xff\xff\xff\xffx.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"]r\xff\xff\xff\xff.",
        b"\x80\x04" + b"]" * _LONG + b".",
        b"\x80\x04" + b"}" * _LONG + b".",
        b"(" * _LONG + b".",
        b"\x80\x04]" + b"\x94" * _LONG + b".",
        b"\x80\x02]" + _SPARSE + b".",
        b"\x80\x02)" + b"\x85" * _LONG + b".",
        b"I" + b"9" * _LONG + b"\n.",
    ],
    ids=["text", "bytes", "bytearray", "bytes4", "text4", "integer", "memo", "lists", "dicts",
         "marks", "memoized", "memo with gaps", "deep", "digits"],
)  # fmt: skip
def test_bombs_take_neither_memory_nor_work(raw: bytes) -> None:
    def read() -> None:
        with suppress(InputError):
            parse_pickle(raw)

    tracemalloc.start()
    try:
        read()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * len(raw) + (4 << 20)
    assert instructions(read) < 32 * len(raw) + 4_000


def test_lists_doubled_through_the_memo_stay_shared() -> None:
    raw = b"\x80\x04]\x94" + b"".join(
        b"]\x94(j" + struct.pack("<I", n) + b"j" + struct.pack("<I", n) + b"e" for n in range(200)
    )
    with pytest.raises(DamagedFile):  # 200 values are left on the stack
        parse_pickle(raw + b".")
    value: Any = []
    for _ in range(200):
        value = [value, value]
    read = parse_pickle(pickle.dumps(value))
    assert read[0] is read[1]


def test_a_tuple_as_a_key_is_refused_because_its_hash_may_cost_without_bound() -> None:
    key: Any = ()
    for _ in range(60):
        key = (key, key)
    raw = b"\x80\x04}" + pickle.dumps(key, 4)[2:-1] + b"Ns."
    with pytest.raises(InputError, match="a tuple is a key"):
        parse_pickle(raw)


def test_keys_made_to_collide_are_refused() -> None:
    with pytest.raises(InputError, match="large integer is a key"):
        parse_pickle(pickle.dumps({(2**61 - 1) * number: 0 for number in range(1, 50)}))


@pytest.mark.parametrize("bits", [8, 12])
def test_keys_that_probe_each_others_places_are_refused(bits: int) -> None:
    keys = dict.fromkeys(integers_on_one_probe_chain(bits))
    with pytest.raises(InputError, match="large integer is a key"):
        parse_pickle(pickle.dumps(keys, 2))


def test_where_a_large_file_takes_too_long_the_interpreter_reads_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = _large(b"}" + b"M\x00\x10Ns" + b"h\x00h\x00\x86")
    assert parse_pickle(raw)[2:] == [{0x1000: None}, ["words", "words"]]
    monkeypatch.setattr(safe_pickle, "_FREE_S", 0.0)
    monkeypatch.setattr(safe_pickle, "_S_PER_BYTE", -1.0)
    with pytest.raises(InputError, match="large integer is a key"):
        parse_pickle(raw)


@pytest.mark.slow
def test_a_probe_chain_of_a_large_file_costs_a_bounded_time() -> None:
    keys = integers_on_one_probe_chain(17)
    raw = pickle.dumps(dict.fromkeys(keys), 2)
    began = time.process_time()
    dict.fromkeys(keys)
    unbounded_s = time.process_time() - began
    with pytest.raises(InputError, match="large integer is a key"):
        parse_pickle(raw)
    assert time.process_time() - began - unbounded_s < unbounded_s / 2


def test_a_memo_that_begins_with_one_is_read() -> None:
    raw = b"(lp1\n(lp2\nS'x'\np3\nag3\naa."
    assert parse_pickle(raw) == pickle.loads(raw) == [["x", "x"]]


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00"])
def test_another_packing_is_named_rather_than_taken_for_an_attack(
    tmp_path: Path, start: bytes
) -> None:
    path = tmp_path / "dump.packed"
    path.write_bytes(start + bytes(99))
    with pytest.raises(InputError, match=r"is packed \("):
        load_safe_pickle(path)


def test_a_compressed_pickle_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps([1, 2])))
    assert load_safe_pickle(path) == [1, 2]


def test_a_compressed_file_that_grows_without_measure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * (40 << 20)))
    with pytest.raises(InputError, match="unpacks to more than 150 times"):
        load_safe_pickle(path)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_file_that_breaks_off_is_called_damaged(cut: int) -> None:
    raw = pickle.dumps({"a": [1, 2.5, "xyz", 2**70], "b": None})
    with pytest.raises(DamagedFile, match="truncated pickle"):
        parse_pickle(raw[:-cut])


# Large files that consist of plain opcodes are read by Python's own unpickler.

_FILLING = b"X\x05\x00\x00\x00wordsq\x00" + b"](" + b"h\x00K\x01" * 10_000 + b"e"

_FRAME = b"\x95" + bytes(8)


def _large(body: bytes, before: bytes = b"") -> bytes:
    """A list of a filling and of what a body pushes, long enough for the quick way."""
    return b"\x80\x02](" + before + _FILLING + body + b"e."


def _is_plain(raw: bytes) -> bool:
    return rewrite_pickle(raw, len(raw) // 16 + 4096) is not None


@pytest.mark.parametrize("protocol", range(2, 6))
def test_large_files_read_alike_either_way(protocol: int) -> None:
    names = ["a group", "of ranks"]
    rows = [
        {"name": f"the row of number {number}", "sizes": [[number, 2], []], "when": 10**18 + number,
         "group": [(names[0], names[1])][0], "x": None}
        for number in range(3000)
    ]  # fmt: skip
    raw = pickle.dumps([names, rows], protocol)
    assert _is_plain(raw)
    assert parse_pickle(raw) == [names, [row | {"group": names} for row in rows]]


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n", b"h\x00h\x00\x93", b"h\x00)R", b"h\x00}b", b"(h\x00h\x00i", b"(h\x00o",
        b"h\x00)\x81", b"\x82\x01", b"h\x00Q", b"Pid\n", b"\x8f", b"\x97", b"h\x002", b"h\x000",
        b"K\x01K\x01\x86", b"h\x00K\x01\x86", b"h\x00h\x00\x86K\x01\x86", b"h\x00h\x00\x86\x86",
        b"JhAhA\x86", b"h\x00\x85", b"(h\x00t", b"G" + bytes(8), b"h\x00h\x00" + _FRAME + b"\x86",
        b"r\xff\xff\xff\x7f", b"r\x00\x00\x10\x00", b"\x8a\xff" + bytes(255),
        b"X\xff\xff\xff\x7f", b"]" * 20_000,
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_interpreter(body: bytes) -> None:
    assert not _is_plain(_large(body))
    assert _is_plain(_large(b"K\x01"))


def test_only_plain_opcodes_are_left() -> None:
    raw = _large(b"h\x00h\x00\x86q\x01h\x01h\x01\x86" + _FRAME)
    plain = rewrite_pickle(raw, 10_000)
    assert plain is not None
    names = {opcode.name for opcode, _, _ in pickletools.genops(plain)}
    assert names == {
        "PROTO", "EMPTY_LIST", "MARK", "BINUNICODE", "BINPUT", "BINGET", "BININT1", "APPENDS",
        "STOP",
    }  # fmt: skip
    pair = ["words", "words"]
    assert parse_pickle(raw)[2:] == [pair, [pair, pair]]


_DICTS = (b"}K\x01Ns" + b"M\x00\x10" * 3 + b"NN") * 40_000
"""A dict of one key, and integers, for each 16 bytes."""


@pytest.mark.parametrize(
    "body",
    [b"N" * 500_000, b"M\x00\x10" * 200_000, b"\x8c\x02ab" * 20_000, b"N" + b"\x94" * 500_000,
     _DICTS, b"Nr\xff\xff\x01\x00" + _DICTS],
    ids=["constants", "integers", "words", "memoized", "dicts", "dicts and a far memo"],
)  # fmt: skip
def test_bombs_of_plain_opcodes_take_no_more_than_their_bytes_can_mean(body: bytes) -> None:
    raw = b"\x80\x04](" + body + b"e."
    assert _is_plain(raw)
    tracemalloc.start()
    try:
        parse_pickle(raw)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * len(raw)


def test_a_memo_further_on_than_a_writer_could_count_is_left_to_the_interpreter() -> None:
    body = _DICTS + b"Nr\xff\xff\x02\x00"  # 196,607 entries would take 983,035 bytes
    assert not _is_plain(b"\x80\x04](" + body + b"e.")


def test_where_python_loses_its_place_in_repeats_the_interpreter_reads_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = _large(b"h\x00h\x00\x86")
    assert parse_pickle(raw)[2] == ["words", "words"]
    monkeypatch.setattr(pickle_rewrite, "_KEEPS_ITS_PLACE", False)
    assert parse_pickle(raw)[2] == ("words", "words")


def test_a_pair_as_a_key_is_refused_in_large_files_too() -> None:
    with pytest.raises(InputError, match="a tuple is a key"):
        parse_pickle(_large(b"}(h\x00h\x00\x86K\x01u"))


def test_a_large_file_that_is_broken_says_what_is_wrong() -> None:
    for body in (b"e", b"h\x07", b"}(K\x01u"):
        raw = _large(body)
        assert _is_plain(raw)
        with pytest.raises(DamagedFile, match="truncated pickle"):
            parse_pickle(raw)
