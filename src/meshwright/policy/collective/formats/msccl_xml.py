"""MSCCL's XML: write a lane program so that RCCL or msccl-executor-nccl can run it, and read one.

<algo name proto nchannels nchunksperloop ngpus coll inplace outofplace minBytes maxBytes>
  <gpu id i_chunks o_chunks s_chunks>
    <tb id send recv chan>
      <step s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep/>

Sources: msccl-tools, msccl/language/ir.py (writer); RCCL, src/misc/msccl/msccl_parser.cc (reader).
A chunk is the message divided by `nchunksperloop`. For gather and scatter the message of MSCCL is
the part of one rank. The file does not name the root of a rooted collective.
"""

from typing import cast
from xml.sax.saxutils import quoteattr

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.buffer_placement import BufferChunk, BufferKind
from meshwright.policy.collective.collective import ROOTED_OPS, Collective, CollectiveOp
from meshwright.policy.collective.formats.msccl_limits import RCCL, MscclLimits, find_limit_problems
from meshwright.policy.collective.msccl.lowering import lower_collective
from meshwright.policy.collective.msccl.program_verification import verify_program
from meshwright.policy.collective.msccl.thread_block_program import (
    DST_WRITING_KINDS,
    PROTOCOLS,
    SRC_READING_KINDS,
    STEP_KINDS,
    MscclProtocol,
    RankThreadBlocks,
    StepDependency,
    StepKind,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
)
from meshwright.policy.collective.verification.verifier import verify_collective
from meshwright.spec.serialization import format_value
from meshwright.spec.xml_elements import XmlElement, read_xml

COLLECTIVES: dict[CollectiveOp, str] = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "all_gather": "allgather",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
}
_LETTER: dict[BufferKind, str] = {"input": "i", "output": "o", "scratch": "s"}
_AGAIN = "export it again, for example with msccl-tools or mw collective export"
_MOST = 1 << 31


def write_msccl_xml(given: Collective | ThreadBlockProgram, *, limits: MscclLimits = RCCL) -> str:
    """Return a program as XML; a collective is lowered first, within the limits.

    Unsound programs and those beyond the limits are refused.
    """
    program = given
    if isinstance(program, Collective):
        refuted = verify_collective(program).problems
        if refuted:
            raise InputError(refuted)
        program = lower_collective(program, most_steps=limits.steps)
    min_bytes, max_bytes = program.min_bytes, program.max_bytes
    problems = list(find_limit_problems(program, limits)) or list(verify_program(program).problems)
    if min_bytes < 0 or max_bytes < 0 or (max_bytes and max_bytes < min_bytes):
        what = f"{min_bytes} to {max_bytes} bytes"
        problems.append(Problem("min_bytes", what, "use 0 <= min_bytes <= max_bytes"))
    if problems:
        raise InputError(problems)
    per_loop = program.chunks
    if program.op in ("gather", "scatter"):
        per_loop //= len(program.ranks)
    channels = 1 + max(
        (lane.channel for own in program.ranks for lane in own.thread_blocks), default=0
    )
    lines = [
        f"<algo name={quoteattr(program.name)} proto={quoteattr(program.protocol)} "
        f'nchannels="{channels}" nchunksperloop="{per_loop}" ngpus="{len(program.ranks)}" '
        f'coll="{COLLECTIVES[program.op]}" inplace="{int(program.in_place)}" '
        f'outofplace="{int(program.out_of_place)}" minBytes="{min_bytes}" maxBytes="{max_bytes}">'
    ]
    for rank, own in enumerate(program.ranks):
        lines.append(
            f'  <gpu id="{rank}" i_chunks="{own.input_chunks}" o_chunks="{own.output_chunks}" '
            f's_chunks="{own.scratch_chunks}">'
        )
        for index, lane in enumerate(own.thread_blocks):
            lines.append(
                f'    <tb id="{index}" send="{lane.send_peer}" recv="{lane.recv_peer}" '
                f'chan="{lane.channel}">'
            )
            lines += [_step_line(number, step) for number, step in enumerate(lane.steps)]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>"]) + "\n"


def _step_line(number: int, step: ThreadBlockStep) -> str:
    src = (_LETTER[step.src.buffer], step.src.chunk) if step.src is not None else ("i", -1)
    dst = (_LETTER[step.dst.buffer], step.dst.chunk) if step.dst is not None else ("o", -1)
    wait = step.dependency or StepDependency(-1, -1)
    return (
        f'      <step s="{number}" type="{step.kind}" srcbuf="{src[0]}" srcoff="{src[1]}" '
        f'dstbuf="{dst[0]}" dstoff="{dst[1]}" cnt="{step.count}" depid="{wait.thread_block}" '
        f'deps="{wait.step}" hasdep="{int(step.has_dependents)}"/>'
    )


def read_msccl_xml(text: str, where: str = "msccl.xml", *, root: int = 0) -> ThreadBlockProgram:
    """Return the program that a file states; `root` is needed for rooted collectives.

    It is not proved: `verify_program` does that.
    """
    top = read_xml(text, where, _AGAIN)
    return _Reader(where, root).program(top)


class _Reader:
    """Collects all that is wrong with a file before it gives up."""

    def __init__(self, where: str, root: int) -> None:
        self.where, self.root = where, root
        self.problems: list[Problem] = []

    def program(self, top: XmlElement) -> ThreadBlockProgram:
        if top.tag != "algo":
            self._add(top, f"<{top.tag}> is not an MSCCL algorithm", "begin with <algo>")
            raise InputError(self.problems)
        ops = {name: op for op, name in COLLECTIVES.items()}
        coll = self._choice(top, "coll", tuple(ops))
        op = ops.get(coll, "all_reduce")
        protocol = cast(MscclProtocol, self._choice(top, "proto", PROTOCOLS))
        chunks = self._int(top, "nchunksperloop", 1)
        gpus = self._numbered(top, "gpu", "id")
        expected = self._int(top, "ngpus", 1)
        if expected != len(gpus):
            self._add(top, f'ngpus="{expected}" but {len(gpus)} <gpu>', "state every rank once")
        if op in ("gather", "scatter"):
            chunks *= max(1, len(gpus))
        if op in ROOTED_OPS and not 0 <= self.root < len(gpus):
            what = f"root {self.root} of {coll} among {len(gpus)} ranks"
            self._add(top, what, "name the root that the file was made for")
        # Files of before msccl-executor-nccl state `inplace` alone.
        in_place = self._int(top, "inplace", 0, most=1)
        out_of_place = self._int(top, "outofplace", 0, most=1, default=1 - in_place)
        most = 1 << 62
        program = ThreadBlockProgram(
            min_bytes=self._int(top, "minBytes", 0, most=most, default=0),
            max_bytes=self._int(top, "maxBytes", 0, most=most, default=0),
            name=top.get("name") or "msccl",
            op=op,
            chunks=chunks,
            ranks=tuple(self._rank(gpu) for gpu in gpus),
            protocol=protocol,
            in_place=bool(in_place),
            out_of_place=bool(out_of_place),
            root=self.root if op in ROOTED_OPS else 0,
        )
        if self.problems:
            raise InputError(self.problems)
        return program

    def _rank(self, gpu: XmlElement) -> RankThreadBlocks:
        return RankThreadBlocks(
            input_chunks=self._int(gpu, "i_chunks", 0),
            output_chunks=self._int(gpu, "o_chunks", 0),
            scratch_chunks=self._int(gpu, "s_chunks", 0),
            thread_blocks=tuple(self._lane(block) for block in self._numbered(gpu, "tb", "id")),
        )

    def _lane(self, block: XmlElement) -> ThreadBlock:
        return ThreadBlock(
            send_peer=self._int(block, "send", -1),
            recv_peer=self._int(block, "recv", -1),
            channel=self._int(block, "chan", -1),
            steps=tuple(self._step(step) for step in self._numbered(block, "step", "s")),
        )

    def _step(self, step: XmlElement) -> ThreadBlockStep:
        kind = cast(StepKind, self._choice(step, "type", STEP_KINDS))
        src, dst = self._spot(step, "srcbuf", "srcoff"), self._spot(step, "dstbuf", "dstoff")
        lane, number = self._int(step, "depid", -1), self._int(step, "deps", -1)
        return ThreadBlockStep(
            kind=kind,
            src=src if kind in SRC_READING_KINDS else None,
            dst=dst if kind in DST_WRITING_KINDS else None,
            count=self._int(step, "cnt", 0),
            dependency=StepDependency(lane, number) if lane >= 0 else None,
            has_dependents=bool(self._int(step, "hasdep", 0, most=1)),
        )

    def _spot(self, step: XmlElement, buffer: str, offset: str) -> BufferChunk | None:
        letters = {letter: name for name, letter in _LETTER.items()}
        letter, chunk = self._choice(step, buffer, tuple(letters)), self._int(step, offset, -1)
        return BufferChunk(letters[letter], chunk) if letter in letters and chunk >= 0 else None

    def _numbered(self, parent: XmlElement, tag: str, number: str) -> list[XmlElement]:
        """Return children in the order of their numbers, which must run from 0 without a gap."""
        children = parent.find_all(tag)
        by_number = {self._int(child, number, 0): child for child in children}
        if sorted(by_number) != list(range(len(children))):
            what = f"{number} of <{tag}> does not run from 0 to {len(children) - 1}"
            self._add(parent, what, f"number every <{tag}> once, from 0 on")
        return [by_number[key] for key in sorted(by_number)]

    def _choice(self, element: XmlElement, name: str, choices: tuple[str, ...]) -> str:
        text = element.get(name)
        if text not in choices:
            what = f"{name} {format_value(text)} of <{element.tag}>" if text else f"no {name}"
            self._add(element, what, f"use one of {', '.join(choices)}")
        return text

    def _int(
        self,
        element: XmlElement,
        name: str,
        least: int,
        *,
        most: int = _MOST,
        default: int | None = None,
    ) -> int:
        text = element.get(name).strip()
        if not text and default is not None:
            return default
        digits = text[1:] if text.startswith("-") else text
        # Python's int() takes digits of any script and any length; MSCCL writes plain ones.
        plain = digits.isascii() and digits.isdigit() and len(digits) < 20
        if plain and least <= int(text) <= most:
            return int(text)
        what = f"{name} {format_value(text)} of <{element.tag}>" if text else f"no {name}"
        self._add(element, what, f"write a whole number from {least} to {most}")
        return least

    def _add(self, element: XmlElement, what: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.where}: line {element.line}", what, fix))
