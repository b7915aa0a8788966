"""What a server and the process of an engine say to each other: MessagePack values in frames.

Nothing that is read is ever run.
"""

import msgspec

from meshwright.run.serve import framing
from meshwright.run.serve.asked import Ask, Gauges, Piece
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.interface import MEMORY, Memory
from meshwright.spec.model import Model


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load a model: the first frame."""

    source: str | Model
    """Where it lies; weights of a `Model` are drawn."""
    settings: EngineSettings
    threads: int | None = None
    """Of torch on a processor; None leaves it as it is."""
    whole: bool = False
    """Send an answer when it has ended, in one piece."""
    parcels_at: str = ""
    """The folder of its parcels in shared memory, which whoever starts it takes away."""


class Asked(msgspec.Struct, frozen=True, tag="ask"):
    """Answer."""

    number: int
    ask: Ask


class Several(msgspec.Struct, frozen=True, tag="several"):
    """Answer all of these, and begin with none before all are there."""

    asks: list[Asked]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for an answer any more, or for vectors."""

    number: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Do something else than answer."""

    number: int
    what: str
    prompts: list[tuple[int, ...]] = []
    adapter: str | None = None
    """The LoRA adapter that prompts are embedded with."""
    path: str = ""
    level: int = 1
    parts: tuple[Memory, ...] = MEMORY
    """What wakes."""
    version: int = 0
    told: bytes = b""
    """A message that only who performs this call can read."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes asks."""

    max_length: int
    embed_length: int
    room: int
    """Tokens whose keys and values fit."""
    took: list[tuple[str, float]]
    hands_over: bool = True
    """Whether keys and values can go to another engine, or come from one."""
    gauges: Gauges = Gauges()
    """What it tells of itself before anybody has asked."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An ask or a call that cannot be done, or the start itself (number 0)."""

    number: int
    problems: list[tuple[str, str, str]]
    """Where, what, and a fix."""
    lost: str = ""
    """Why keys and values that came with an ask did not arrive, where that is it."""
    failed: str = ""
    """What went wrong with it in the engine, where it is not to blame itself."""


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """Pieces of answers."""

    pieces: list[tuple[int, Piece]]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A call is done."""

    number: int
    vectors: list[list[float]] = []
    told: bytes = b""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """What the engine does at this moment."""

    gauges: Gauges


ToWorker = Start | Asked | Several | Cancel | Call
FromWorker = Ready | Refused | Answered | Done | Beat
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


def framed(message: ToWorker | FromWorker) -> bytes:
    """Return a message as a frame."""
    return framing.framed(_encoder.encode(message))
