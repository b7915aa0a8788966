"""What the lines that NCCL_DEBUG prints say, one line at a time.

A line is `TIME host:process:thread [device] NCCL INFO message`; warnings also have the source's
file and line before NCCL. The time is there only where NCCL_DEBUG_TIMESTAMP_LEVELS asks for it;
its form is the user's choice, and any with a date is read. Launchers add words before all this.
Forms of messages are those of NCCL's sources (src/init.cc, src/enqueue.cc, src/transport/*.cc).
"""

import re
from datetime import UTC, datetime
from typing import NamedTuple

LINE_BYTES = 1 << 14
"""NCCL itself cuts its lines at 1,024 bytes; longer ones are others'."""
_HEAD_CHARACTERS = 400
_LEVEL = re.compile(r"NCCL (INFO|WARN|TRACE|CALL) ")
_ORIGIN = re.compile(
    r"(?:.*[\s\]|>])?([\w.\-]{1,255}):(\d{1,10}):(\d{1,10}) (?:\[(-?\d{1,6})\] )?"
    r"((?:[\d.]+ )?(?:\S+:\d+ )?(?:\([^()]*\) )?)$"
)
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,:](\d{1,9}))?"
    r"|(\d{4})/(\d\d)/(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,:](\d{1,9}))?"
)
COMMUNICATOR = re.compile(
    r"comm (0x[0-9a-f]{1,16}) rank (\d{1,9}) n[rR]anks (\d{1,9}) cudaDev (\d{1,6})"
    r"(?: nvmlDev (\d{1,6}))? busId ([0-9a-f]{1,16})(?: commId (0x[0-9a-f]{1,16}))?"
    r"(?: parent (0x[0-9a-f]{1,16}))?"
)
STAGE = re.compile(r"- ?(Init|Destroy|Abort|Revoke|Finalize) (START|COMPLETE)")
TIMINGS = re.compile(
    r"Init timings - \S{1,64}: rank \d{1,9} nranks \d{1,9} total (\d{1,9}\.\d{1,6})"
)
CONNECTION = re.compile(
    r"^Channel (\d{1,4})(?:/(\d{1,2}))? : (\d{1,9})\[(\w{1,16})\] -> (\d{1,9})\[(\w{1,16})\] "
    r"(?:\[(send|receive)\] )?via ([^\n]{1,80})$"
)
RING_ORDER = re.compile(r"^Channel (\d{1,4})/(\d{1,4}) :((?:\s+\d{1,9})+)\s*$")
TREE = re.compile(r"\[(\d{1,4})\] (-?\d{1,9})/(-?\d{1,9})/(-?\d{1,9})->(-?\d{1,9})->(-?\d{1,9})")
COLLECTIVE = re.compile(
    r"^(\w{2,40}): opCount ([0-9a-f]{1,16}) sendbuff (\S{1,20}) recvbuff (\S{1,20}) "
    r"(?:acc \S{1,20} )?count (\d{1,18}) datatype (\d{1,3}) op (\d{1,10}) root (-?\d{1,9}) "
    r"comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,9})\] stream (\S{1,20})"
)
VERSION = re.compile(r"NCCL version (\d[\w.+\-]{1,40})")
NODES = re.compile(r"^comm (0x[0-9a-f]{1,16}) rank \d{1,9} nRanks \d{1,9} nNodes (\d{1,9})\b")
CHANNELS = re.compile(r"^(\d{1,4}) coll channels\b")
PROCESS_FACTS = (
    ("version", re.compile(r"^NCCL version (\d[\w.+\-]{1,40})")),
    ("network", re.compile(r"^Using network (\S.{0,79})")),
    ("devices", re.compile(r"^NET/IB : Using\s+(\[0\].{1,900}?)(?: \[RO\])?\s*;")),
    ("setting", re.compile(r"^(NCCL_\w{1,60} set by environment to .{1,200}?)\.?$")),
    ("no rdma", re.compile(r"^(?:NET/\w+ : )?GPU Direct RDMA Disabled for (.{1,120})")),
    ("no peers", re.compile(r"^P2P is disabled between connected GPUs (\d{1,4} and \d{1,4})")),
)
"""What a process says of itself: the subject, and the form of the line."""
# ncclDataType_t and ncclRedOp_t of nccl.h.
DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16",
    "fp8_e4m3", "fp8_e5m2",
)  # fmt: skip
REDUCTIONS = ("sum", "prod", "max", "min", "avg")


class LogOrigin(NamedTuple):
    """Who printed a line."""

    host: str
    pid: int
    tid: int


class NcclLogLine(NamedTuple):
    """One line of NCCL's."""

    origin: LogOrigin
    device: int
    """-1 where it does not say."""
    level: str
    source: str
    """Of a warning: the file and line in NCCL's sources."""
    message: str
    time_ns: int | None


def parse_line(text: str) -> NcclLogLine | None:
    """Take a line apart; None where it is not NCCL's."""
    level = _LEVEL.search(text)
    if level is None:
        return None
    head = text[max(0, level.start() - _HEAD_CHARACTERS) : level.start()]
    origin = _ORIGIN.match(head)
    if origin is None:
        return None
    host, process, thread, device, source = origin.groups()
    return NcclLogLine(
        LogOrigin(host, int(process), int(thread)),
        int(device) if device is not None else -1,
        level[1],
        source.strip() if level[1] == "WARN" else "",
        text[level.end() :].rstrip(),
        parse_timestamp(head[: origin.start(1)]),
    )


def parse_timestamp(text: str) -> int | None:
    """The time in a text, in ns since 1970, read as UTC; None where there is none."""
    times = list(_TIME.finditer(text))
    if not times:
        return None
    found = times[-1]
    year, month, day, hour, minute, second, digits = (
        found.groups()[:7] if found[1] else found.groups()[7:]
    )
    try:
        whole = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=UTC
        )
    except ValueError:
        return None
    return int(whole.timestamp()) * 10**9 + int((digits or "").ljust(9, "0"))
