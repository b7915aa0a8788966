"""A small engine, and the answers of the same model computed one by one."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.asked import Ask, Piece, Sampling
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.spec.serving import Limits

LENGTH = 64


def engine_of(
    decoder: Decoder, *, blocks: int = 64, parts: dict[str, Any] | None = None, **given: Any
) -> Engine:
    limits = Limits(**{"batch_tokens": 24, "batch_requests": 8, "block_tokens": 4, **given})
    cache = PagedCache(decoder, blocks, limits.block_tokens, host_blocks=limits.host_blocks)
    rows = limits.batch_requests
    forward = Forward(decoder, cache, max_length=LENGTH, state_rows=rows + 1)
    sampler = Sampler(rows + 1, decoder.model.vocab, cache.device)
    runner = Runner(forward, sampler, rows, graph_tokens=limits.graph_tokens)
    return Engine(runner, limits, **parts or {})


class Heard:
    """The pieces of one ask."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for piece in self.pieces if piece.choice == choice for t in piece.tokens]

    @property
    def finishes(self) -> dict[int, str]:
        return {piece.choice: piece.finish for piece in self.pieces if piece.finish}


def run_out(engine: Engine, turns: int = 2000) -> None:
    for _ in range(turns):
        if not engine.turn() and engine.is_idle:
            break
        for sink, piece in engine.outbox():
            sink(piece)
    else:
        raise AssertionError("the engine does not come to an end")
    for sink, piece in engine.outbox():
        sink(piece)


def asked(
    engine: Engine, prompts: Sequence[Sequence[int]], output: int = 12, **sampling: Any
) -> list[Heard]:
    """Ask everything at once and wait for all answers."""
    heard = []
    for prompt in prompts:
        sink = Heard()
        settings = Sampling(**{"temperature": 0.0, "max_tokens": output, **sampling})
        engine.add(Ask(prompt=tuple(prompt), sampling=settings), sink)
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
