"""Which reader tells apart what the choices of a chat say."""

from collections.abc import Callable

from meshwright.run.serve.server.desk import Desk
from meshwright.run.serve.server.faults import refused
from meshwright.run.serve.server.heard import ListedCalls, NamedCall, Reader, Tools


def reader_maker(tools: Tools, desk: Desk, *, constrained: bool) -> Callable[[], Reader] | None:
    """Return what makes the reader of a choice; None where everything said is content."""
    if tools.way == "named":
        return lambda: NamedCall(tools.name)
    if tools.way == "listed":
        return ListedCalls
    if tools.way == "none" or constrained:
        return None
    raise refused(
        "`tool_choice` is auto, but it is not known how this model writes calls: start the server"
        " with a tool format, or demand a call with `required`",
        "tool_choice",
    )
