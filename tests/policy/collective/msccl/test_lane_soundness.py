"""What is wrong with a lane program is found, with the shortest counter-example."""

import random

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import build_algorithm, verify_collective
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.msccl import (
    ThreadBlockProgram,
    lift_program,
    lower_collective,
    verify_program,
)
from meshwright.policy.collective.msccl.thread_block_program import (
    RankThreadBlocks,
    StepDependency,
    ThreadBlock,
    ThreadBlockStep,
)
from tests.policy.collective.msccl.lane_interpreter import right

replace = msgspec.structs.replace


def spot(text: str) -> BufferChunk:
    names = {"i": "input", "o": "output", "s": "scratch"}
    return BufferChunk(names[text[0]], int(text[1:]))  # type: ignore[arg-type]


def step(
    kind: str, src: str = "", dst: str = "", count: int = 1, **more: object
) -> ThreadBlockStep:
    return ThreadBlockStep(
        kind=kind,  # type: ignore[arg-type]
        src=spot(src) if src else None,
        dst=spot(dst) if dst else None,
        count=count,
        **more,  # type: ignore[arg-type]
    )


def exchange(
    *lanes_of_ranks: list[ThreadBlock], chunks: int = 2, scratch: int = 0
) -> ThreadBlockProgram:
    """An all-gather in place; every rank gives `chunks / ranks` chunks."""
    part = chunks // len(lanes_of_ranks)
    return ThreadBlockProgram(
        name="mine",
        op="all_gather",
        chunks=chunks,
        in_place=False,
        ranks=tuple(
            RankThreadBlocks(
                input_chunks=part,
                output_chunks=chunks,
                scratch_chunks=scratch,
                thread_blocks=tuple(lanes),
            )
            for lanes in lanes_of_ranks
        ),
    )


def swap(rank: int, count: int = 1, first: str = "s") -> list[ThreadBlock]:
    """Lanes of one of two ranks: keep the own part, send it, take the other's."""
    other = 1 - rank
    own, theirs = rank * count, other * count
    send, take = step("s", "i0", count=count), step("r", dst=f"o{theirs}", count=count)
    order = (send, take) if first == "s" else (take, send)
    return [
        ThreadBlock(steps=(step("cpy", "i0", f"o{own}", count=count),)),
        ThreadBlock(send_peer=other, recv_peer=other, steps=order),
    ]


def problem(program: ThreadBlockProgram, **more: int) -> str:
    proof = verify_program(program, **more)
    assert not proof.is_correct
    (found,) = proof.problems
    return str(found)


def test_a_swap_is_sound() -> None:
    assert verify_program(exchange(swap(0), swap(1))).is_correct


def test_receives_that_wait_for_each_other_are_a_circle() -> None:
    said = problem(exchange(swap(0, first="r"), swap(1, first="r")))
    assert "deadlock" in said
    assert "rank 0, lane 1, step 0 (takes output 1 from rank 1) waits for rank 1, lane 1" in said
    assert "rank 1, lane 1, step 0 (takes output 0 from rank 0) waits for rank 0, lane 1" in said


def test_the_shortest_circle_is_told() -> None:
    # Ranks 2, 3 and 4 wait in a circle of three; ranks 0 and 1 for each other.
    def wait(rank: int, giver: int, taker: int) -> list[ThreadBlock]:
        takes = step("r", dst=f"o{giver}")
        return [ThreadBlock(send_peer=taker, recv_peer=giver, steps=(takes, step("s", "i0")))]

    program = exchange(
        wait(0, 1, 1), wait(1, 0, 0), wait(2, 4, 3), wait(3, 2, 4), wait(4, 3, 2), chunks=5
    )
    said = problem(program)
    assert "rank 0" in said
    assert "rank 1" in said
    assert "rank 2" not in said


def test_sends_hang_where_more_is_sent_than_fits_in_between() -> None:
    program = exchange(swap(0, count=3), swap(1, count=3), chunks=6)
    said = problem(program, in_flight=2, at_once=1)
    assert "2 pieces of 1 chunks in flight" in said
    assert "send fewer chunks at once" in said
    assert verify_program(program, in_flight=3, at_once=1).is_correct
    assert verify_program(program, in_flight=1, at_once=3).is_correct


def test_small_messages_fit_where_large_ones_hang() -> None:
    program = exchange(swap(0, count=3), swap(1, count=3), chunks=6)
    assert not verify_program(program).is_correct
    assert verify_program(replace(program, max_bytes=1 << 20)).is_correct


def test_a_message_that_is_never_received_is_named() -> None:
    lanes = swap(1)
    quiet = [lanes[0], replace(lanes[1], steps=lanes[1].steps[:1])]
    said = problem(exchange(swap(0), quiet))
    assert said.startswith("rank 0, lane 1, step 0 (sends input 0 to rank 1): is never received")


def test_a_message_that_is_never_sent_is_named() -> None:
    lanes = swap(1)
    quiet = [lanes[0], replace(lanes[1], steps=lanes[1].steps[1:])]
    assert "waits for a message that is never sent" in problem(exchange(swap(0), quiet))


def test_messages_of_different_sizes_are_named() -> None:
    short = swap(1, count=2)
    short[1] = replace(short[1], steps=(short[1].steps[0], step("r", dst="o0")))
    said = problem(exchange(swap(0, count=2), short, chunks=4))
    assert "message 0 from rank 0 to rank 1 on channel 0" in said
    assert "sends 2 chunks" in said
    assert "expects 1" in said


def test_a_send_of_what_another_lane_receives_must_wait_for_it() -> None:
    line = lower_collective(build_algorithm("ring", "broadcast", 3), style="apart")
    sender = next(
        (index, lane)
        for index, lane in enumerate(line.ranks[1].thread_blocks)
        if lane.send_peer == 2 and lane.steps[0].dependency
    )
    lane = replace(sender[1], steps=tuple(replace(s, dependency=None) for s in sender[1].steps))
    lanes = list(line.ranks[1].thread_blocks)
    lanes[sender[0]] = lane
    ranks = (line.ranks[0], replace(line.ranks[1], thread_blocks=tuple(lanes)), line.ranks[2])
    said = problem(replace(line, ranks=ranks))
    assert "race" in said or "holds nothing yet" in said


def test_a_race_names_both_steps_and_the_chunk() -> None:
    both = [
        ThreadBlock(steps=(step("cpy", "i0", "o0"),)),
        ThreadBlock(send_peer=1, steps=(step("s", "o0"),)),
        ThreadBlock(recv_peer=1, steps=(step("r", dst="o1"),)),
    ]
    other = [
        ThreadBlock(steps=(step("cpy", "i0", "o1"),)),
        ThreadBlock(send_peer=0, steps=(step("s", "i0"),)),
        ThreadBlock(recv_peer=0, steps=(step("r", dst="o0"),)),
    ]
    said = problem(exchange(both, other))
    assert said.startswith("rank 0, lane 1, step 0")
    assert "race on output chunk 0: written by lane 0, step 0 and read by lane 1, step 0" in said
    told = [replace(both[0], steps=(step("cpy", "i0", "o0", has_dependents=True),)), *both[1:]]
    told[1] = ThreadBlock(send_peer=1, steps=(step("s", "o0", dependency=StepDependency(0, 0)),))
    assert verify_program(exchange(told, other)).is_correct


def test_a_wait_for_a_step_that_never_tells_is_refused() -> None:
    lanes = swap(0)
    lanes[1] = replace(
        lanes[1], steps=(step("s", "i0", dependency=StepDependency(0, 0)), lanes[1].steps[1])
    )
    assert "never told" in problem(exchange(lanes, swap(1)))


def test_a_wait_passes_at_the_next_step_that_tells() -> None:
    lanes = [
        ThreadBlock(steps=(step("cpy", "i0", "o0"), step("cpy", "o0", "s0", has_dependents=True))),
        ThreadBlock(
            send_peer=1,
            recv_peer=1,
            steps=(step("s", "o0", dependency=StepDependency(0, 0)), step("r", dst="o1")),
        ),
    ]
    assert verify_program(exchange(lanes, swap(1), scratch=1)).is_correct


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (StepDependency(7, 0), "waits for lane 7"),
        (StepDependency(0, 9), "waits for step 9"),
    ],
)
def test_a_wait_for_something_that_is_not_there_is_refused(
    broken: StepDependency, said: str
) -> None:
    lanes = swap(0)
    lanes[1] = replace(lanes[1], steps=(step("s", "i0", dependency=broken), lanes[1].steps[1]))
    assert said in problem(exchange(lanes, swap(1)))


def test_a_lane_that_waits_for_itself_is_a_circle_of_one() -> None:
    lanes = swap(0)
    waits = step("cpy", "i0", "o0", dependency=StepDependency(0, 0), has_dependents=True)
    assert "deadlock" in problem(exchange([ThreadBlock(steps=(waits,)), lanes[1]], swap(1)))


def test_chunks_outside_a_buffer_are_named() -> None:
    lanes = swap(0)
    lanes[0] = ThreadBlock(steps=(step("cpy", "i1", "o0"),))
    said = problem(exchange(lanes, swap(1)))
    assert "rank 0, lane 0, step 0" in said
    assert "input 1 to 1, but there are 1 chunks" in said


def alone(*steps: ThreadBlockStep, scratch: int = 3, in_place: bool = False) -> ThreadBlockProgram:
    """An all-reduce of three chunks of one rank."""
    own = RankThreadBlocks(
        input_chunks=3,
        output_chunks=3,
        scratch_chunks=scratch,
        thread_blocks=(ThreadBlock(steps=steps),),
    )
    return ThreadBlockProgram(
        name="mine", op="all_reduce", chunks=3, ranks=(own,), in_place=in_place
    )


@pytest.mark.parametrize("kind", ["cpy", "re"])
def test_a_step_does_not_read_half_of_what_it_writes(kind: str) -> None:
    first = step("cpy", "i0", "s0", count=3)
    said = problem(alone(first, step(kind, "s1", "s0", count=2)))
    assert said.startswith(
        f"rank 0, lane 0, step 1: {kind} reads scratch 1 and writes scratch 0, 2 chunks each, "
        "which overlap"
    )
    assert "move 1 chunks at a time" in said


def test_a_step_that_adds_what_arrives_does_not_overlap_either() -> None:
    ring = lower_collective(build_algorithm("ring", "all_reduce", 2, channels=2), style="apart")
    adds = step("rrc", "o1", "o0", count=2)
    takes = ThreadBlock(recv_peer=1, steps=(adds,))
    ranks = (replace(ring.ranks[0], thread_blocks=(takes,)), ring.ranks[1])
    assert "rrc reads output 1 and writes output 0" in problem(replace(ring, ranks=ranks))


def test_input_and_output_overlap_where_they_share_memory() -> None:
    shifted = step("cpy", "i1", "o0", count=2)
    assert "holds chunk 1 of the message" in problem(alone(shifted))
    assert "which overlap (run in place)" in problem(alone(shifted, in_place=True))


def test_a_step_may_work_on_the_very_same_chunks() -> None:
    assert verify_program(alone(step("cpy", "i0", "o0", count=3), in_place=True)).is_correct
    halves = (step("cpy", "i0", "s0", count=3), step("cpy", "s0", "o0", count=3))
    assert verify_program(alone(*halves, scratch=3)).is_correct


def test_more_chunks_than_can_be_followed_are_refused() -> None:
    whole = step("cpy", "i0", "o0", count=3)
    assert "chunks of scratch memory" in problem(alone(whole, scratch=2**31))
    assert "chunks in all steps" in problem(alone(step("nop", count=2**31)))
    lane = replace(alone(whole).ranks[0].thread_blocks[0], channel=2**31)
    far = replace(alone(whole), ranks=(replace(alone(whole).ranks[0], thread_blocks=(lane,)),))
    assert "channel 2147483648" in problem(far)


def test_two_lanes_on_one_connection_are_refused() -> None:
    lanes = [*swap(0), ThreadBlock(send_peer=1, steps=(step("s", "i0"),))]
    assert "lane 1 too has send peer 1 on channel 0" in problem(exchange(lanes, swap(1)))


def test_a_lost_contribution_is_named() -> None:
    lanes = swap(0)
    program = exchange([lanes[1]], swap(1))
    assert "rank 0, output chunk 0: holds nothing at the end" in problem(program)


def test_a_chunk_in_the_wrong_place_is_named() -> None:
    lanes = swap(0)
    wrong = [ThreadBlock(steps=(step("cpy", "i0", "o1"),)), lanes[1]]
    swapped = replace(lanes[1], steps=(lanes[1].steps[0], step("r", dst="o0")))
    said = problem(exchange([wrong[0], swapped], swap(1)))
    assert "rank 0, output chunk 0: holds chunk 1 of the message, not chunk 0" in said


def test_a_contribution_counted_twice_is_named() -> None:
    ring = lower_collective(build_algorithm("ring", "all_reduce", 2))
    own = ring.ranks[0]
    lane = own.thread_blocks[0]
    twice = replace(lane, steps=(*lane.steps, step("re", "i0", "o0")))
    said = problem(replace(ring, ranks=(replace(own, thread_blocks=(twice,)), ring.ranks[1])))
    assert "counts chunk 0 of rank 0 more than once" in said


def test_a_program_may_be_right_out_of_place_and_wrong_in_place() -> None:
    # The sum goes to the output while the input is still to be sent.
    lanes = [
        [
            ThreadBlock(recv_peer=1 - rank, steps=(step("rrc", "i0", "o0"),)),
            ThreadBlock(send_peer=1 - rank, steps=(step("s", "i0"),)),
        ]
        for rank in range(2)
    ]
    ranks = tuple(
        RankThreadBlocks(
            input_chunks=1, output_chunks=1, scratch_chunks=0, thread_blocks=tuple(own)
        )
        for own in lanes
    )
    apart = ThreadBlockProgram(name="mine", op="all_reduce", chunks=1, ranks=ranks, in_place=False)
    assert verify_program(apart).is_correct
    assert "run in place" in problem(replace(apart, in_place=True))


def test_room_for_no_piece_is_refused() -> None:
    with pytest.raises(InputError, match="1 or more"):
        verify_program(exchange(swap(0), swap(1)), in_flight=0)


def test_an_overwritten_source_does_not_change_a_message_on_its_way() -> None:
    # Both send their scratch, then overwrite it with what arrives: a buffered swap.
    def rotate(rank: int) -> list[ThreadBlock]:
        other = 1 - rank
        steps = (
            step("cpy", "i0", "s0"),
            step("s", "s0"),
            step("r", dst="s0"),
            step("cpy", "s0", f"o{other}"),
            step("cpy", "i0", f"o{rank}"),
        )
        return [ThreadBlock(send_peer=other, recv_peer=other, steps=steps)]

    program = exchange(rotate(0), rotate(1), scratch=1)
    assert verify_program(program).is_correct
    assert verify_collective(lift_program(program)).problems == ()


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_program_that_is_called_sound_runs_right(seed: int) -> None:
    chance = random.Random(seed)
    names = [("ring", "all_reduce"), ("two_shot", "all_reduce"), ("bruck", "all_gather")]
    name, op = chance.choice(names)
    program = lower_collective(
        build_algorithm(name, op, 3),  # type: ignore[arg-type]
        style=chance.choice(["fused", "apart"]),
    )
    damaged = _damaged(program, chance)
    if verify_program(damaged).is_correct:
        assert all(right(damaged, run) for run in range(5))


def _damaged(program: ThreadBlockProgram, chance: random.Random) -> ThreadBlockProgram:
    rank = chance.randrange(len(program.ranks))
    own = program.ranks[rank]
    index = chance.randrange(len(own.thread_blocks))
    lane = own.thread_blocks[index]
    steps = list(lane.steps)
    number = chance.randrange(len(steps))
    other = chance.randrange(len(steps))
    kind = chance.choice(["swap", "drop_wait", "move", "untold"])
    if kind == "swap":
        steps[number], steps[other] = steps[other], steps[number]
    elif kind == "drop_wait":
        steps = [replace(entry, dependency=None) for entry in steps]
    elif kind == "move" and steps[number].dst is not None:
        steps[number] = replace(steps[number], dst=BufferChunk("output", chance.randrange(3)))
    else:
        steps[number] = replace(steps[number], has_dependents=not steps[number].has_dependents)
    lanes = list(own.thread_blocks)
    lanes[index] = replace(lane, steps=tuple(steps))
    ranks = list(program.ranks)
    ranks[rank] = replace(own, thread_blocks=tuple(lanes))
    return replace(program, ranks=tuple(ranks))
