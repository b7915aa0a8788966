"""A small engine of the digits' vocabulary, and environments of several turns."""

from typing import Any

import torch

from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.rollouts import Reply, RewardPart, Turn
from meshwright.run.posttrain.rollouts.verifiers import Check
from meshwright.run.serve.engine.engine import Engine
from meshwright.spec.model import Attention, Block, Mlp, Model, Rotary
from tests.run.serve.engine.small import engine_of

JUDGES = "tests.run.posttrain.rollouts.judges"


def decoder() -> Decoder:
    mixer = Attention(heads=2, kv_heads=1, head_dim=8, rotary=Rotary())
    block = Block(name="plain", mixer=mixer, mlp=Mlp(width=24))
    model = Model(
        name="digits", hidden=16, vocab=14, blocks=(block,), pattern="2*plain", max_positions=64
    )
    made = build(model, dtype=torch.float32)
    materialise(made, "cpu", seed=3)
    return made.eval()


def engine(**given: Any) -> Engine:
    return engine_of(decoder(), **given)


class _Calls:
    """Three turns: a tool answers the first two, a verifier judges the last."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self._turns = (12, prompt % 10, 10), 0

    def step(self, turn: Turn, /) -> Reply:
        self._turns += 1
        if self._turns < 3:
            part = RewardPart(name="call", value=0.25, reason="a call")
            return Reply(observation=(13, self._turns, 13), rewards=(part,))
        job = {"number": sum(turn.tokens)}
        return Reply(done=True, checks=(Check(name="sum", verifier=f"{JUDGES}:double", job=job),))


class Calls:
    name = "calls"
    verifiers = (f"{JUDGES}:double",)
    waits = True

    def reset(self, prompt: int, /) -> _Calls:
        return _Calls(prompt)
