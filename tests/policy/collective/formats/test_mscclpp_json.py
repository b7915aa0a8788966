"""Execution plans do what the collective promises when an interpreter of their own runs them."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, CollectiveBuilder, build_algorithm
from meshwright.policy.collective.formats import write_mscclpp_json
from meshwright.policy.collective.formats.mscclpp_json import COLLECTIVES, Buffers
from tests.policy.collective.formats.mscclpp_interpreter import Interpreter, expected
from tests.policy.collective.gallery import gallery, label

GALLERY = [collective for collective in gallery((3, 4)) if collective.op in COLLECTIVES]


def check(text: str, collective: Collective, seed: int = 0) -> None:
    run = Interpreter(text, seed)
    run.run()
    for rank in range(collective.ranks):
        wanted = expected(collective.op, collective.ranks, collective.chunks, rank, collective.root)
        if wanted is not None:
            assert run.outputs(rank) == wanted


def sorts(text: str) -> set[str]:
    gpus = json.loads(text)["gpus"]
    return {entry["channel_type"] for gpu in gpus for entry in gpu["channels"]}


def ops(text: str) -> list[str]:
    gpus = json.loads(text)["gpus"]
    return [op["name"] for gpu in gpus for block in gpu["threadblocks"] for op in block["ops"]]


@pytest.mark.parametrize("buffers", ["in_place", "out_of_place"])
@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_a_plan_gives_what_was_promised(collective: Collective, buffers: Buffers) -> None:
    if collective.op == "all_to_all" and buffers == "in_place":
        with pytest.raises(InputError, match="out_of_place"):
            write_mscclpp_json(collective, buffers=buffers)
        return
    check(write_mscclpp_json(collective, buffers=buffers), collective)
    check(write_mscclpp_json(collective, buffers=buffers, per_node=2), collective, seed=1)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_in_which_blocks_and_ports_run_does_not_matter(seed: int) -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    check(write_mscclpp_json(ring, per_node=2), ring, seed)


def test_peers_of_one_node_use_memory_and_all_others_ports() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    assert sorts(write_mscclpp_json(ring)) == {"memory"}
    assert sorts(write_mscclpp_json(ring, per_node=1)) == {"port"}
    assert sorts(write_mscclpp_json(ring, per_node=2)) == {"memory", "port"}


def test_one_switch_is_used_where_all_goes_through_it() -> None:
    nvls = build_algorithm("nvls", "all_reduce", 4)
    text = write_mscclpp_json(nvls)
    assert "switch" in sorts(text)
    assert "glres" in ops(text)
    assert "put" not in ops(text)
    assert "gstore" in ops(write_mscclpp_json(build_algorithm("nvls", "all_gather", 4)))


def test_a_switch_is_hosted_where_the_executor_has_no_operation_for_it() -> None:
    assert "switch" not in sorts(write_mscclpp_json(build_algorithm("nvls", "reduce_scatter", 4)))
    assert "switch" not in sorts(
        write_mscclpp_json(build_algorithm("nvls", "all_reduce", 4), per_node=2)
    )


def test_threads_meet_between_data_and_signals() -> None:
    text = write_mscclpp_json(build_algorithm("two_shot", "all_reduce", 4))
    for gpu in json.loads(text)["gpus"]:
        for block in gpu["threadblocks"]:
            names = [op["name"] for op in block["ops"]]
            for before, after in pairwise(names):
                if before in ("wait", "sem_acquire"):
                    assert after not in ("put", "copy", "re"), names
                if before in ("put", "copy", "re"):
                    assert after == "nop", names


def test_the_plan_bounds_its_messages() -> None:
    data = json.loads(
        write_mscclpp_json(build_algorithm("ring", "all_reduce", 4), max_bytes=1 << 20)
    )
    assert data["min_message_size"] == 4 * 16
    assert data["max_message_size"] == 1 << 20
    assert data["buffer_alignment"] == 16
    free = json.loads(write_mscclpp_json(build_algorithm("ring", "all_reduce", 4)))
    assert free["max_message_size"] < 1 << 32


def test_long_lanes_are_cut_into_thread_blocks() -> None:
    text = write_mscclpp_json(build_algorithm("ring", "all_reduce", 16))
    blocks = [block for gpu in json.loads(text)["gpus"] for block in gpu["threadblocks"]]
    assert max(len(block["ops"]) for block in blocks) <= 64


def change(text: str, alter: Callable[[dict[str, Any]], None]) -> str:
    data = json.loads(text)
    alter(data)
    return json.dumps(data)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def alter(data: dict[str, Any]) -> None:
        for gpu in data["gpus"]:
            for block in gpu["threadblocks"]:
                block["ops"] = [op for op in block["ops"] if op["name"] != name]

    return alter


def passes(text: str, collective: Collective, seed: int) -> bool:
    try:
        check(text, collective, seed)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", ["wait", "signal", "put", "re", "sem_release", "sem_acquire"])
def test_the_interpreter_notices_what_is_missing(name: str) -> None:
    ring = build_algorithm("ring", "all_reduce", 3)
    text = change(write_mscclpp_json(ring), without(name))
    assert not all(passes(text, ring, seed) for seed in range(10))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"per_node": 0}, "0 ranks of a node"),
        ({"threads": 100}, "100 threads"),
        ({"max_bytes": 8}, "use max_bytes of 64 or more"),
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        write_mscclpp_json(build_algorithm("ring", "all_reduce", 4), **arguments)


def test_a_collective_that_is_not_sound_is_not_written() -> None:
    builder = CollectiveBuilder("half", "all_reduce", ranks=2, chunks=1)
    with builder.step():
        builder.add(0, 1, chunk=0)
    with pytest.raises(InputError, match="lacks chunk 0 of rank 1"):
        write_mscclpp_json(builder.build())


def test_operations_without_a_plan_are_refused() -> None:
    with pytest.raises(InputError, match="no gather"):
        write_mscclpp_json(build_algorithm("direct", "gather", 4))
