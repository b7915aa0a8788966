"""The verifier of programs: runs what a model wrote and then its tests, in the process it is in.

It imports the standard library alone, so that its process starts at once. The process is bounded in
time, memory and output by who started it. A program that ends it has not passed; one that is made
to deceive a test in the same interpreter may, so tests of the hostile kind need walls of their own.
"""

import builtins
from collections.abc import Mapping
from typing import Any

_SHOWN = 400
"""Characters of a reason: it is kept with every answer, and a program may say anything."""


def passes_tests(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `program` runs and its `tests` raise nothing; otherwise 0, and why."""
    names: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    for what in ("program", "tests"):
        try:
            code = compile(job[what], f"<{what}>", "exec")
            # What a model wrote is what this process is for.
            exec(code, names)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the tests did not pass
            return 0.0, f"{what}{_line(error)}: {_told(error)}"[:_SHOWN]
    return 1.0, "passed"


def _told(error: BaseException) -> str:
    """Return an error in words; its class may be the program's, and tell nothing."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - what the program wrote is at fault, and no judge
        return kind


def _line(error: BaseException) -> str:
    """Return which line of the program or its tests failed."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in ("<program>", "<tests>"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" line {line}"
