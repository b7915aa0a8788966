"""Work as a number that no busy machine changes: the instructions that Python itself carries out.

What C does within one of them is not seen. A loop of ours around it is.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """Run something; return how many of Python's instructions that took."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
