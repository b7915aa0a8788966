"""Resource limits of a process."""

import math
import resource

_FILES = 64


def apply_limits(*, memory_bytes: int, file_bytes: int, processes: bool) -> list[str]:
    """Set the limits of this process; return those that the system refused."""
    wanted = {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_FSIZE": file_bytes,
        "RLIMIT_NOFILE": _FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if not processes:
        wanted["RLIMIT_NPROC"] = 0
    refused = []
    for name, value in wanted.items():
        which = getattr(resource, name, None)
        try:
            if which is None:
                continue
            _, hard = resource.getrlimit(which)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (most, most))
        except (ValueError, OSError):
            refused.append(name)
    return refused


def limit_processor_time(seconds: float) -> None:
    """End this process with SIGXCPU when it has used so much more processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))
