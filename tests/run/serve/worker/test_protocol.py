"""Frames are put together however the bytes come, and nothing larger than sense is waited for."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DamagedFile
from meshwright.run.serve.frame_codec import FrameDecoder
from meshwright.run.serve.request import Request, RequestOutput, TokenLogprob, merge_outputs
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.worker.protocol import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    WorkerMessage,
    encode_message,
    engine_message_decoder,
    worker_message_decoder,
)

ASKED = AddRequest(
    3,
    Request(
        prompt_token_ids=(1, 2, 300_000),
        sampling_params=SamplingParams(n=2, stop=("ü",), seed=1 << 61),
    ),
)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_come_whole_however_they_are_cut(cuts: list[int]) -> None:
    messages: list[WorkerMessage] = [ASKED, AbortRequest(3), ASKED]
    data = b"".join(encode_message(message) for message in messages)
    frames, found = FrameDecoder(), []
    for cut in [*cuts, len(data)]:
        found += [worker_message_decoder.decode(body) for body in frames.feed(data[:cut])]
        data = data[cut:]
    assert found == messages


def test_pieces_come_as_they_were() -> None:
    piece = RequestOutput(index=1, token_ids=(5,), text="é", finish_reason="stop", stop_reason="x")
    (body,) = FrameDecoder().feed(encode_message(EngineOutputs([(7, piece)])))
    assert engine_message_decoder.decode(body) == EngineOutputs([(7, piece)])


def test_pieces_of_a_choice_are_joined() -> None:
    told = [TokenLogprob(each, -0.5) for each in (5, 6)]
    pieces = [
        RequestOutput(
            index=1, token_ids=(5,), text="a", logprobs=(told[0],), cached_tokens=8, queue_s=0.5
        ),
        RequestOutput(index=1, token_ids=(6,), text="b", logprobs=(told[1],)),
        RequestOutput(index=1, finish_reason="abort"),
    ]
    assert merge_outputs(pieces) == RequestOutput(
        index=1, token_ids=(5, 6), text="ab", logprobs=tuple(told), finish_reason="abort",
        cached_tokens=8, queue_s=0.5,
    )  # fmt: skip
    assert merge_outputs(pieces[:1]) == pieces[0]


def test_a_length_without_sense_is_refused() -> None:
    with pytest.raises(DamagedFile, match="a frame of"):
        list(FrameDecoder().feed(struct.pack("<I", (1 << 32) - 1)))
