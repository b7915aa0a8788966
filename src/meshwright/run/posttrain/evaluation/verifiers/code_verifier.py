"""The verifier of programs: runs what a model wrote, and its tests, in two confined processes.

The tests run where the program does not. They reach its functions over a socket, and see plain
values and references; so a program that changes built-ins, overrides comparisons or ends its
process deceives no test. Who watches both reads the verdict from the tests' process alone. Tests
that need more of a program than that, such as its globals to be replaced, cannot be judged so.
"""

import builtins
import importlib
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from meshwright.run.posttrain.evaluation.verifiers.remote_objects import (
    ProgramEndedError,
    ProgramLink,
    find_names,
)
from meshwright.run.posttrain.evaluation.verifiers.remote_program import (
    ProgramServer,
    describe_error,
)
from meshwright.run.posttrain.rollout.verifiers.frames import encode_frame, read_frame
from meshwright.run.posttrain.rollout.verifiers.program_sandbox import (
    ProgramSandbox,
    uses_program_sandbox,
)
from meshwright.run.posttrain.rollout.verifiers.verifier_outcome import (
    Verdict,
    VerifierFailure,
    read_verdict,
)

_SHOWN = 400
_MOST_VERDICT_BYTES = 1 << 16


@uses_program_sandbox
def passes_tests(job: Mapping[str, Any], sandbox: ProgramSandbox) -> tuple[float, str]:
    """Return 1 where a `program` runs and its `tests` raise nothing; otherwise 0, and why."""
    until_s = time.monotonic() + sandbox.deadline_s
    theirs, ours = socket.socketpair()
    verdicts, judge = socket.socketpair()
    with verdicts:
        with theirs, ours, judge:
            program = sandbox.start(
                lambda: ProgramServer(theirs).run(job["program"]), (theirs.fileno(),)
            )
            sandbox.start(
                lambda: _report_tests(ProgramLink(ours), job["tests"], judge),
                (ours.fileno(), judge.fileno()),
                inspectable=False,
            )
        try:
            message = read_frame(verdicts, most_bytes=_MOST_VERDICT_BYTES, until_s=until_s)
        except TimeoutError:
            raise VerifierFailure("timeout", "") from None
    if message is None:
        raise VerifierFailure("died", "the process of the tests ended before they did")
    verdict = read_verdict(message)
    if verdict.outcome == "died":
        raise _describe_end(program, until_s)
    if verdict.outcome != "ok":
        raise VerifierFailure(verdict.outcome, verdict.reason)
    return verdict.value, verdict.reason


def _describe_end(program: int, until_s: float) -> VerifierFailure:
    """Say how the process of a program ended."""
    from meshwright.run.posttrain.rollout.verifiers.judge_server import describe_exit

    while True:
        found, status = os.waitpid(program, os.WNOHANG)
        if found:
            end = describe_exit(os.waitstatus_to_exitcode(status))
            return VerifierFailure(end.outcome, end.reason)
        if time.monotonic() > until_s:
            return VerifierFailure("died", "it closed its connection to the tests")
        select.select([], [], [], 0.001)


def _report_tests(link: ProgramLink, tests: str, judge: socket.socket) -> None:
    """Run tests, and send the verdict."""
    judge.sendall(encode_frame(_run_tests(link, tests)._asdict()))


def _run_tests(link: ProgramLink, tests: str) -> Verdict:
    sys.set_int_max_str_digits(0)
    try:
        if fault := link.wait_until_run():
            return Verdict("ok", 0.0, fault[:_SHOWN])
        code = compile(tests, "<tests>", "exec")
        names = {"__name__": "answer", "__builtins__": builtins}
        names |= _get_names(link, sorted(find_names(code)))
        exec(code, names)  # noqa: S102 - the purpose of this isolated process
    except MemoryError:
        return Verdict("memory", 0.0, "it ran out of memory")
    except ProgramEndedError:
        return Verdict("died", 0.0, "")
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the tests did not pass
        return Verdict("ok", 0.0, f"tests{describe_error(error, ('<tests>',))}"[:_SHOWN])
    return Verdict("ok", 1.0, "passed")


def _get_names(link: ProgramLink, names: list[str]) -> dict[str, Any]:
    """Return what tests see of a program.

    Modules of the standard library are the real ones, whatever the program calls by their names;
    so are built-in functions, unless the program defines nothing else that the tests use.
    """
    found = link.get_names(names)
    for name in found:
        if name in sys.stdlib_module_names:
            found[name] = importlib.import_module(name)
    others = {name: value for name, value in found.items() if not hasattr(builtins, name)}
    return others or found
