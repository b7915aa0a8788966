"""Our own file keeps every field of a collective, and names what is wrong in it."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, build_algorithm
from meshwright.policy.collective.formats import read_collective_json, write_collective_json
from tests.policy.collective.gallery import gallery, label


@pytest.mark.parametrize("collective", list(gallery((2, 3, 8))), ids=label)
def test_a_collective_survives_the_file(collective: Collective) -> None:
    assert read_collective_json(write_collective_json(collective)) == collective


def test_a_ring_of_many_ranks_is_a_small_file() -> None:
    ring = build_algorithm("ring", "all_reduce", 256)
    text = write_collective_json(ring)
    assert len(text) < 30_000
    assert read_collective_json(text) == ring


def test_fields_with_a_default_may_be_left_out() -> None:
    data = json.loads(write_collective_json(build_algorithm("ring", "all_gather", 3)))
    for name in ("root", "switches", "counts", "peers"):
        del data[name]
    assert read_collective_json(json.dumps(data)) == build_algorithm("ring", "all_gather", 3)


@pytest.mark.parametrize(
    ("path", "value", "where", "said"),
    [
        (("format",), "other/2", "format", "not one of"),
        (("op",), "dance", "op", "not one of"),
        (("ranks",), 0, "ranks", "0 ranks"),
        (("chunks",), 5, "chunks", "cannot be cut"),
        (("slots",), 1, "slots", "do not hold"),
        (("extra",), 1, "extra", "no field"),
        (("sweeps", 0, "span"), 0, "sweeps[0].span", "0 repetitions"),
        (("sweeps", 0, "span"), 10**9, "sweeps[0].span", "repetitions"),
        (("sweeps", 0, "moves", 1), [1, 2], "sweeps[0].moves[1]", "2 items"),
        (("sweeps", 0, "moves", 1, 4), 0, "sweeps[0].moves[1]", "count 0"),
        (("sweeps", 0, "moves", 1, 5), 2, "sweeps[0].moves[1]", "adds 2"),
        (("sweeps", 0, "moves", 1, 0), -1, "sweeps[0].moves[1]", "src -1"),
        (("sweeps", 0, "moves", 1, 0), "one", "sweeps[0].moves[1][0]", "'one'"),
        (("sweeps", 0, "moves", 1, 2), 10**30, "sweeps[0].moves[1]", "src_slot 1000000000000"),
        (("sweeps", 0, "moves", 1, 4), 2**31 - 1, "sweeps[0].moves[1]", "count 2147483647"),
        (("slots",), 10**12, "slots", "too large"),
        (("sweeps", 0, "shift", "slot_wrap"), -1, "sweeps[0].shift.slot_wrap", "out of range"),
        (("sweeps", 0, "shift", "slot_order"), [-1], "sweeps[0].shift.slot_order", "no slot -1"),
    ],
)
def test_a_broken_file_says_where_and_what(
    path: tuple[Any, ...], value: object, where: str, said: str
) -> None:
    data = json.loads(write_collective_json(build_algorithm("ring", "all_gather", 3)))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError) as caught:
        read_collective_json(json.dumps(data), "mine.json")
    (first, *_) = caught.value.problems
    assert first.where == f"mine.json: {where}"
    assert said in first.what
    assert first.fix


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"format": "meshwright.collective/1"}'])
def test_what_is_no_such_file_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"mine\.json"):
        read_collective_json(text, "mine.json")


def test_what_could_not_be_read_again_is_not_written() -> None:
    ring = build_algorithm("ring", "all_gather", 3)
    idle = replace(ring, sweeps=(replace(ring.sweeps[0], span=0),))
    with pytest.raises(InputError, match="0 repetitions"):
        write_collective_json(idle)


def test_the_steps_of_a_whole_file_are_bounded() -> None:
    data = json.loads(write_collective_json(build_algorithm("ring", "all_gather", 3)))
    data["sweeps"] = [data["sweeps"][0] | {"span": 600_000}] * 2
    with pytest.raises(InputError, match="1,200,000 steps in all"):
        read_collective_json(json.dumps(data))
