"""A run that draws rollouts into a file, for a test to kill: `killed.py FILE PROMPTS`.

An engine without a model stands in for the real one, so that nothing has to be loaded: it draws
tokens by the seed alone, as the real one does for the same weights.
"""

import hashlib
import sys
import time
from typing import Any, cast

from meshwright.run.posttrain.rollout import (
    RecordingSource,
    RolloutConfig,
    RolloutGenerator,
    RolloutLog,
    SortingDigits,
    describe_origin,
)
from meshwright.run.posttrain.rollout.verifiers import VerifierPool
from meshwright.run.serve.request import Request, RequestOutput, TokenLogprob

PAUSE_S = 0.01


class PretendEngine:
    """Answers one ask at each turn."""

    max_model_len = 64

    def __init__(self, pause_s: float = 0.0) -> None:
        self._asked: list[tuple[Request, Any]] = []
        self._ready: list[tuple[Any, RequestOutput]] = []
        self._pause_s, self.drawn = pause_s, 0

    @property
    def is_idle(self) -> bool:
        return not self._asked

    def add_request(self, request: Request, sink: Any) -> list[object]:
        self._asked.append((request, sink))
        return []

    def abort(self, states: list[object]) -> None:
        assert not states
        self._asked.clear()

    def step(self) -> None:
        if not self._asked:
            return
        time.sleep(self._pause_s)
        request, sink = self._asked.pop(0)
        digest = hashlib.blake2b(str(request.sampling_params.seed).encode(), digest_size=4).digest()
        told = tuple(TokenLogprob(byte % 10, -byte / 300) for byte in digest)
        tokens = tuple(each.token_id for each in told)
        self._ready.append(
            (sink, RequestOutput(token_ids=tokens, logprobs=told, finish_reason="length"))
        )
        self.drawn += 1

    def take_outputs(self) -> list[tuple[Any, RequestOutput]]:
        ready, self._ready = self._ready, []
        return ready


def draw(path: str, prompts: int, pause_s: float = 0.0, version: int = 1) -> int:
    """Draw what is missing; return how many that were."""
    task, engine = SortingDigits(), PretendEngine(pause_s)
    with VerifierPool(task.verifiers, workers=1) as pool:
        generator = RolloutGenerator(
            cast(Any, engine), task, pool, RolloutConfig(group_size=4, max_tokens=4)
        )
        keys = generator.build_keys(3, range(prompts))
        with RolloutLog(path, describe_origin(generator, "pretend")) as log:
            groups = RecordingSource(generator, log).get_groups(3, range(prompts), version)
            assert [each.key for group in groups for each in group] == keys
            assert log.keys == set(keys)
    return engine.drawn


if __name__ == "__main__":
    draw(sys.argv[1], int(sys.argv[2]), PAUSE_S)
