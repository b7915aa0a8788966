"""Frames are put together however the bytes come, and nothing larger than sense is waited for."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DamagedFile
from meshwright.run.serve.asked import Ask, Piece, Sampling, TokenLogprob, joined
from meshwright.run.serve.framing import Frames
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Cancel,
    ToWorker,
    framed,
    from_worker,
    to_worker,
)

ASKED = Asked(3, Ask(prompt=(1, 2, 300_000), sampling=Sampling(n=2, stop=("ü",), seed=1 << 61)))


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_come_whole_however_they_are_cut(cuts: list[int]) -> None:
    messages: list[ToWorker] = [ASKED, Cancel(3), ASKED]
    data = b"".join(framed(message) for message in messages)
    frames, found = Frames(), []
    for cut in [*cuts, len(data)]:
        found += [to_worker.decode(body) for body in frames.add(data[:cut])]
        data = data[cut:]
    assert found == messages


def test_pieces_come_as_they_were() -> None:
    piece = Piece(choice=1, tokens=(5,), text="é", finish="stop", stopped_by="x")
    (body,) = Frames().add(framed(Answered([(7, piece)])))
    assert from_worker.decode(body) == Answered([(7, piece)])


def test_pieces_of_a_choice_are_joined() -> None:
    told = [TokenLogprob(each, -0.5) for each in (5, 6)]
    pieces = [
        Piece(choice=1, tokens=(5,), text="a", logprobs=(told[0],), cached_tokens=8, queued_s=0.5),
        Piece(choice=1, tokens=(6,), text="b", logprobs=(told[1],)),
        Piece(choice=1, finish="cancelled"),
    ]
    assert joined(pieces) == Piece(
        choice=1, tokens=(5, 6), text="ab", logprobs=tuple(told), finish="cancelled",
        cached_tokens=8, queued_s=0.5,
    )  # fmt: skip
    assert joined(pieces[:1]) == pieces[0]


def test_a_length_without_sense_is_refused() -> None:
    with pytest.raises(DamagedFile, match="a frame of"):
        list(Frames().add(struct.pack("<I", (1 << 32) - 1)))
