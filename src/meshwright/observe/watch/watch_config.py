"""What a watch is told to do."""

import msgspec


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How often to look, what to keep, when to raise the alarm."""

    max_overhead: float = 0.008
    """Part of the time that watching may take: captures wait until it is paid for."""
    capture_interval: int | None = None
    """Capture every so many steps instead, whatever it costs."""
    record_shapes: bool = True
    """Record the shapes of operators."""
    with_stack: bool = False
    """Record Python's stacks: expensive, steps then take far longer."""
    slowdown_threshold: float = 0.10
    """The least rise of the step time that is told, as a part of the usual one."""
    slowdown_capture_steps: int = 2
    """Steps that are captured after a slowdown."""
    hang_timeout_s: float = 120.0
    """How long no step may end, if steps are not longer themselves."""
    max_captures: int = 40
    """Captures at most."""
    max_capture_bytes: int = 2_000_000_000
    """Bytes of captures at most."""
