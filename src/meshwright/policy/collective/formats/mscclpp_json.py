"""MSCCL++'s execution plan: write a collective so that its executor can run it.

Senders put chunks straight into the peer's memory and signal; what has to be added up lands in
scratch memory first. The first message of a connection, and each one that overwrites something the
peer still used, waits for the peer's signal that it may. Peers of one node use memory channels, all
others port channels; a collective over one switch uses its switch channel.

Source: microsoft/mscclpp, src/core/executor/execution_plan.cc (fields), src/core/include/
execution_kernel.hpp (what each operation does) and execution_common.hpp (limits), of 2026-08.
"""

import json
from typing import Any, Literal

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.formats.mscclpp_puts import MscclppPlan, build_put_plan
from meshwright.policy.collective.formats.mscclpp_switch import (
    build_switch_plan,
    find_switch_owners,
)
from meshwright.policy.collective.msccl.lowering import lower_collective
from meshwright.policy.collective.verification.verifier import verify_collective

COLLECTIVES: dict[CollectiveOp, str] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
ALIGNMENT_BYTES = 16
"""Bytes: chunks begin at multiples of it (`buffer_alignment`)."""
MAX_OPERATIONS = 64
"""Operations of a thread block (MAX_OPERATION)."""
_OFFSETS = (1 << 32) - 1
"""Offsets in bytes have 32 bits."""
_MESSAGES = 7
"""Messages of a thread block to begin with: each takes at most nine operations."""

Buffers = Literal["in_place", "out_of_place"]


def write_mscclpp_json(
    collective: Collective,
    *,
    per_node: int | None = None,
    buffers: Buffers = "in_place",
    min_bytes: int = 0,
    max_bytes: int | None = None,
    threads: int = 1024,
) -> str:
    """Return a collective as an execution plan; without `per_node` all ranks share a node.

    `min_bytes` and `max_bytes` bound the message, as nccl-tests counts it.
    """
    problems = _problems(collective, per_node, buffers, threads)
    if problems:
        raise InputError(problems)
    per_node = per_node or collective.ranks
    owners = find_switch_owners(collective) if per_node >= collective.ranks else None
    if owners is not None:
        plan = build_switch_plan(collective, owners, shared=buffers == "in_place")
    else:
        plan = _spread_plan(collective, per_node, shared=buffers == "in_place")
    chunks = collective.chunks
    least = max(min_bytes, ALIGNMENT_BYTES * chunks)
    most = _OFFSETS * chunks // max(chunks, plan.max_buffer_chunks)
    most = most if max_bytes is None else min(most, max_bytes)
    if least > most:
        what = f"no message of {chunks} chunks of {ALIGNMENT_BYTES} bytes or more is in between"
        fix = f"use max_bytes of {least} or more"
        raise InputError([Problem("max_bytes", f"{least} to {most} bytes: {what}", fix)])
    data: dict[str, Any] = {
        "name": collective.name,
        "collective": COLLECTIVES[collective.op],
        "protocol": "Simple",
        "inplace": buffers == "in_place",
        "reuse_resources": False,
        "gpus": plan.gpus,
        "num_threads_per_block": threads,
        "use_double_scratch_buffer": False,
        "buffer_alignment": ALIGNMENT_BYTES,
        "min_message_size": least,
        "max_message_size": most,
    }
    return json.dumps(data, indent=1) + "\n"


def _spread_plan(collective: Collective, per_node: int, *, shared: bool) -> MscclppPlan:
    """Use as many thread blocks as it takes to keep each within its operations."""
    messages = _MESSAGES
    while True:
        program = lower_collective(collective, style="apart", most_steps=messages)
        plan = build_put_plan(program, per_node, shared=shared)
        if plan.max_block_operations <= MAX_OPERATIONS:
            return plan
        if messages == 1:
            what = f"a thread block of {plan.max_block_operations} operations, the executor takes "
            fix = "use an algorithm in which fewer steps wait for each other"
            raise InputError([Problem("operations", f"{what}{MAX_OPERATIONS}", fix)])
        messages -= 1


def _problems(
    collective: Collective, per_node: int | None, buffers: Buffers, threads: int
) -> list[Problem]:
    problems = []
    if collective.op not in COLLECTIVES:
        what = f"MSCCL++ plans have no {collective.op} with buffers of its own sizes"
        problems.append(Problem("op", what, f"use one of {', '.join(COLLECTIVES)}"))
    elif collective.op == "all_to_all" and buffers == "in_place":
        what = "all_to_all reads chunks that it also overwrites when input and output share memory"
        problems.append(Problem("buffers", what, 'use buffers="out_of_place"'))
    if per_node is not None and per_node < 1:
        problems.append(Problem("per_node", f"{per_node} ranks of a node", "use 1 or more"))
    if not 32 <= threads <= 1024 or threads % 32:
        what = f"{threads} threads of a block"
        problems.append(Problem("threads", what, "use a multiple of 32 from 32 to 1024"))
    return problems or list(verify_collective(collective).problems)
