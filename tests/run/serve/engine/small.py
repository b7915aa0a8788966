"""A small engine, and the answers of the same model computed one by one."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig

LENGTH = 64


def engine_of(
    decoder: Decoder, *, blocks: int = 64, parts: dict[str, Any] | None = None, **given: Any
) -> Engine:
    limits = SchedulerConfig(
        **{"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4, **given}
    )
    cache = PagedKVCache(decoder, blocks, limits.block_size, num_host_blocks=limits.num_cpu_blocks)
    rows = limits.max_num_seqs
    forward = ServedModel(decoder, cache, max_model_len=LENGTH, state_rows=rows + 1)
    sampler = TokenSampler(rows + 1, decoder.model.vocab, cache.device)
    runner = ModelRunner(forward, sampler, rows, graph_tokens=limits.max_cudagraph_capture_size)
    return Engine(runner, limits, **parts or {})


class Heard:
    """The pieces of one ask."""

    def __init__(self) -> None:
        self.pieces: list[RequestOutput] = []

    def __call__(self, piece: RequestOutput) -> None:
        self.pieces.append(piece)

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for piece in self.pieces if piece.index == choice for t in piece.token_ids]

    @property
    def finishes(self) -> dict[int, str]:
        return {piece.index: piece.finish_reason for piece in self.pieces if piece.finish_reason}


def run_out(engine: Engine, turns: int = 2000) -> None:
    for _ in range(turns):
        if not engine.step() and engine.is_idle:
            break
        for sink, piece in engine.take_outputs():
            sink(piece)
    else:
        raise AssertionError("the engine does not come to an end")
    for sink, piece in engine.take_outputs():
        sink(piece)


def asked(
    engine: Engine, prompts: Sequence[Sequence[int]], output: int = 12, **sampling: Any
) -> list[Heard]:
    """Ask everything at once and wait for all answers."""
    heard = []
    for prompt in prompts:
        sink = Heard()
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": output, **sampling})
        engine.add_request(Request(prompt_token_ids=tuple(prompt), sampling_params=settings), sink)
        heard.append(sink)
    run_out(engine)
    return heard


@cache
def reference(make: Callable[[], Decoder], prompt: tuple[int, ...], output: int) -> list[int]:
    """Return what a decoder that keeps nothing writes."""
    decoder, ids = _fresh(make), list(prompt)
    device = decoder.embedding.weight.device
    with torch.no_grad():
        for _ in range(output):
            ids.append(int(decoder(torch.tensor([ids], device=device))[0, -1].argmax()))
    return ids[len(prompt) :]


@cache
def _fresh(make: Callable[[], Decoder]) -> Decoder:
    return make()
