"""Programs survive MSCCL's XML, and a file that is broken says where and what would mend it."""

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, build_algorithm, verify_collective
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.formats import read_msccl_xml, write_msccl_xml
from meshwright.policy.collective.formats.msccl_limits import (
    MSCCL_EXECUTOR,
    RCCL,
    find_limit_problems,
)
from meshwright.policy.collective.msccl import (
    ThreadBlockProgram,
    lift_program,
    lower_collective,
    verify_program,
)
from meshwright.policy.collective.msccl.program_checks import PROGRAM_OPS
from meshwright.policy.collective.msccl.thread_block_program import (
    RankThreadBlocks,
    StepDependency,
    ThreadBlock,
    ThreadBlockStep,
)
from tests.policy.collective.gallery import gallery, label
from tests.policy.collective.msccl.lane_interpreter import right

GALLERY = [collective for collective in gallery((3, 4)) if collective.op in PROGRAM_OPS]

SWAP = """<!-- as msccl-tools writes it: unused ends of a step name the peer's chunk -->
<algo name="swap" proto="LL" nchannels="1" nchunksperloop="2" ngpus="2" coll="alltoall" inplace="0">
  <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="1" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""  # noqa: E501


@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_a_collective_survives_the_file(collective: Collective) -> None:
    text = write_msccl_xml(collective)
    program = read_msccl_xml(text, root=collective.root)
    assert program == lower_collective(collective, most_steps=RCCL.steps)
    assert verify_program(program).problems == ()
    assert right(program, seed=0)


def test_a_file_as_others_write_it_is_read() -> None:
    program = read_msccl_xml(SWAP)
    assert (program.op, program.protocol, program.chunks) == ("all_to_all", "LL", 2)
    assert (program.in_place, program.out_of_place) == (False, True)
    assert verify_program(program).is_correct
    assert verify_collective(lift_program(program)).is_correct


def test_the_file_states_the_sizes_it_is_for() -> None:
    program = lower_collective(
        build_algorithm("ring", "all_gather", 2),
        protocol="LL128",
        min_bytes=1024,
        max_bytes=1 << 20,
    )
    text = write_msccl_xml(program)
    assert 'proto="LL128"' in text
    assert 'minBytes="1024" maxBytes="1048576"' in text
    assert read_msccl_xml(text) == program


def test_the_message_of_a_gather_is_the_part_of_one_rank() -> None:
    text = write_msccl_xml(build_algorithm("direct", "gather", 4, root=2))
    assert 'nchunksperloop="1" ngpus="4" coll="gather"' in text
    assert verify_program(read_msccl_xml(text, root=2)).is_correct
    assert not verify_program(read_msccl_xml(text, root=1)).is_correct


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('coll="alltoall"', 'coll="dance"', 2, "coll 'dance'"),
        ('proto="LL"', "", 2, "no proto"),
        ('ngpus="2"', 'ngpus="3"', 2, 'ngpus="3" but 2 <gpu>'),
        ('<gpu id="1"', '<gpu id="0"', 2, "id of <gpu> does not run from 0 to 1"),
        ('type="cpy"', 'type="fly"', 5, "type 'fly'"),
        ('srcbuf="i"', 'srcbuf="x"', 5, "srcbuf 'x'"),
        ('cnt="1"', 'cnt="many"', 5, "cnt 'many'"),
        ('cnt="1"', 'cnt="-1"', 5, "cnt '-1'"),
        ('srcoff="0"', f'srcoff="{9**40}"', 5, "srcoff"),
        ('<step s="1"', '<step s="2"', 7, "s of <step> does not run from 0 to 1"),
        ('hasdep="0"', 'hasdep="2"', 5, "hasdep '2'"),
    ],
)
def test_a_broken_file_says_where_and_what(old: str, new: str, line: int, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_msccl_xml(SWAP.replace(old, new, 1), "mine.xml")
    (first, *_) = caught.value.problems
    assert first.where == f"mine.xml: line {line}"
    assert said in first.what
    assert first.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not whole XML"),
        ("<algo", "not whole XML"),
        ("<plan/>", "not an MSCCL algorithm"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><algo name="&b;"/>', "document type"),
    ],
)
def test_what_is_no_algorithm_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_msccl_xml(text)


def test_a_root_outside_the_ranks_is_refused() -> None:
    text = write_msccl_xml(build_algorithm("chain", "broadcast", 3))
    with pytest.raises(InputError, match="root 3"):
        read_msccl_xml(text, root=3)


def test_further_waits_are_steps_of_their_own() -> None:
    program = lower_collective(build_algorithm("one_shot", "all_reduce", 4))
    nops = [
        (own, lane, number)
        for own in program.ranks
        for lane in own.thread_blocks
        for number, step in enumerate(lane.steps)
        if step.kind == "nop"
    ]
    assert nops
    assert all(lane.steps[number + 1].dependency for _, lane, number in nops)


def test_an_unsound_program_is_not_written() -> None:
    ring = lower_collective(build_algorithm("ring", "all_reduce", 2))
    wrong = ThreadBlockProgram(name="half", op="all_reduce", chunks=2, ranks=(ring.ranks[0],) * 2)
    with pytest.raises(InputError):
        write_msccl_xml(wrong)


def test_an_unsound_collective_is_refused_with_its_counter_example() -> None:
    ring = build_algorithm("ring", "all_reduce", 3)
    half = replace(ring, sweeps=ring.sweeps[:1])
    with pytest.raises(InputError, match=r"rank \d, after step 1, chunk \d: slot \d lacks chunk"):
        write_msccl_xml(half)
    moves = ring.sweeps[0].moves
    stray = moves.table.copy()
    stray[0, 1] = 9
    outside = replace(ring, sweeps=(replace(ring.sweeps[0], moves=type(moves)(stray)),))
    with pytest.raises(InputError, match="writes place 9, but there are 3"):
        write_msccl_xml(outside)


def test_a_file_of_too_many_chunks_is_refused() -> None:
    text = write_msccl_xml(build_algorithm("ring", "all_reduce", 2))
    large = text.replace('nchunksperloop="2"', 'nchunksperloop="300000000"')
    (problem,) = verify_program(read_msccl_xml(large)).problems
    assert problem.where == "chunks"
    assert "600,000,000 chunks of all ranks together" in problem.what


def one_lane(*steps: ThreadBlockStep, channel: int = 0, copies: int = 1) -> ThreadBlockProgram:
    lanes = tuple(ThreadBlock(channel=channel, steps=steps) for _ in range(copies))
    own = RankThreadBlocks(input_chunks=1, output_chunks=1, scratch_chunks=1, thread_blocks=lanes)
    return ThreadBlockProgram(name="mine", op="all_reduce", chunks=1, ranks=(own,))


COPY = ThreadBlockStep(
    kind="cpy", src=BufferChunk("input", 0), dst=BufferChunk("output", 0), count=1
)
ADD = ThreadBlockStep(
    kind="re", src=BufferChunk("scratch", 0), dst=BufferChunk("output", 0), count=1
)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (one_lane(COPY, copies=65), "65 lanes, more than the 64 of RCCL"),
        (one_lane(*[COPY] * 65), "65 steps, more than the 64 of RCCL"),
        (one_lane(COPY, channel=128), "channel 128"),
        (one_lane(replace(COPY, count=72)), "72 chunks at once"),
        (
            one_lane(ThreadBlockStep(kind="nop", dependency=StepDependency(0, 0)), COPY),
            "a nop only waits together",
        ),
        (one_lane(ADD, replace(ADD, count=2)), "are fused"),
        (one_lane(*[COPY] * 64, copies=64), "XML elements"),
        (one_lane(replace(COPY, src=BufferChunk("input", 40_000))), "chunk 40000"),
    ],
)
def test_programs_beyond_the_limits_are_refused_with_a_fix(
    program: ThreadBlockProgram, said: str
) -> None:
    problems = list(find_limit_problems(program, RCCL))
    assert any(said in problem.what and problem.fix for problem in problems), problems
    with pytest.raises(InputError):
        write_msccl_xml(program)


def test_the_other_interpreter_takes_more_lanes() -> None:
    direct = build_algorithm("direct", "all_gather", 40)
    with pytest.raises(InputError, match="lanes, more than the 64"):
        write_msccl_xml(direct)
    problems = list(find_limit_problems(lower_collective(direct), MSCCL_EXECUTOR))
    assert [problem for problem in problems if "lanes, more than the 128" in problem.what] == []
