"""What a watch is told to do."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How often to look, what to keep, when to raise the alarm."""

    budget: float = 0.008
    """Part of the time that watching may take: captures wait until it is paid for."""
    every: int | None = None
    """Capture every so many steps instead, whatever it costs."""
    shapes: bool = True
    """Record the shapes of operators."""
    stack: bool = False
    """Record Python's stacks: dear, and steps then take far longer."""
    slowdown: float = 0.10
    """The least rise of the step time that is told, as a part of the usual one."""
    triggered_steps: int = 2
    """Steps that are captured after a slowdown."""
    patience_s: float = 120.0
    """How long no step may end, if steps are not longer themselves."""
    keep: int = 40
    """Captures at most."""
    keep_bytes: int = 2_000_000_000
    """Bytes of captures at most."""
