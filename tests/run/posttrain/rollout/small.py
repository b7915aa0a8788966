"""A small engine of the digits' vocabulary, and environments of several turns."""

from typing import Any

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.rollout import EnvironmentStep, RewardComponent, RolloutTurn
from meshwright.run.posttrain.rollout.verifiers import VerifierJob
from meshwright.run.serve.engine.engine import Engine
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from tests.run.serve.engine.small import engine_of

JUDGES = "tests.run.posttrain.rollout.judges"


def decoder() -> Decoder:
    mixer = AttentionSpec(heads=2, kv_heads=1, head_dim=8, rotary=Rotary())
    block = BlockSpec(name="plain", mixer=mixer, mlp=MLPSpec(width=24))
    model = Model(
        name="digits", hidden=16, vocab=14, blocks=(block,), pattern="2*plain", max_positions=64
    )
    made = build_decoder(model, dtype=torch.float32)
    materialize(made, "cpu", seed=3)
    return made.eval()


def engine(**given: Any) -> Engine:
    return engine_of(decoder(), **given)


class _Calls:
    """Three turns: a tool answers the first two, a verifier judges the last."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self._turns = (12, prompt % 10, 10), 0

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        self._turns += 1
        if self._turns < 3:
            part = RewardComponent(name="call", value=0.25, reason="a call")
            return EnvironmentStep(observation=(13, self._turns, 13), rewards=(part,))
        job = {"number": sum(turn.tokens)}
        return EnvironmentStep(
            done=True,
            verifier_jobs=(VerifierJob(name="sum", verifier=f"{JUDGES}:double", payload=job),),
        )


class Calls:
    name = "calls"
    verifiers = (f"{JUDGES}:double",)
    may_block = True

    def reset(self, prompt: int, /) -> _Calls:
        return _Calls(prompt)
