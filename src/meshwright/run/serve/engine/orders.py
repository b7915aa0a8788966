"""`Orders`: what a device does in one step, as plain values that can be sent to other processes.

A row is a place on the device for one answer: its table of blocks, its position, its last token and
how it draws. Orders name rows; whoever carries them out keeps no other state.
"""

import msgspec

from meshwright.run.serve.asked import Sampling


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An answer takes a row."""

    row: int
    sampling: Sampling
    """With a seed, so that all ranks draw the same."""
    prompt: tuple[int, ...]
    """Read where penalties count its tokens; else empty."""
    output: tuple[int, ...]
    """What it had written before it made room for others."""
    choice: int
    adapter: int = -1
    seeded: bool = True
    """Whether somebody named the seed."""


class Telling(msgspec.Struct, frozen=True, array_like=True):
    """How likely tokens of a prompt were is to be told."""

    offset: int
    """The first token of the part whose successor is told of."""
    targets: tuple[int, ...]
    """The successors."""
    top: int
    """How many of the likeliest tokens are told beside each."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a row that are computed: known ones, and guesses behind its last."""

    row: int
    begin: int
    """The position of the first of them."""
    tokens: tuple[int, ...]
    draws: tuple[int, ...]
    """Rows that draw a token behind the last: none, the row itself, or it and its forks."""
    checks: bool = False
    """All but the first token are guesses: the row draws behind every one of them."""
    telling: Telling | None = None


class Going(msgspec.Struct, frozen=True, array_like=True):
    """A row decodes from this step on."""

    row: int
    position: int
    """Where its last token stands."""
    token: int | None = None
    """That token, where the device has not drawn it itself for this row."""


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Blocks on their way between the device and host memory."""

    device: tuple[int, ...]
    host: tuple[int, ...]


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """Keys and values that another engine computed."""

    blocks: tuple[int, ...]
    data: bytearray


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are added to a row's table."""

    row: int
    place: int
    """Where in the table."""
    blocks: tuple[int, ...]


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """One step, in the order of its fields."""

    copies: tuple[tuple[int, int], ...] = ()
    """Blocks and what they are copied to, as the step before left it to do."""
    moved_out: tuple[Moved, ...] = ()
    moved_in: tuple[Moved, ...] = ()
    arrived: tuple[Arrived, ...] = ()
    entries: tuple[Entry, ...] = ()
    written: tuple[Written, ...] = ()
    going: tuple[Going, ...] = ()
    rows: tuple[int, ...] | None = None
    """Rows that decode, in their order; None where they are the same as in the step before."""
    parts: tuple[Part, ...] = ()
