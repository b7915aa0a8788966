"""`Vectors`: prompts that are embedded between an engine's turns, as there is room for them.

    vectors = upkeep.vectors(prompts)
    while not vectors.go_on():
        engine.turn()

Answers go on meanwhile. Blocks that they leave are kept for the prompt whose turn it is before
somebody else can have them, so that it waits only for those who run.
"""

from collections.abc import Sequence

import msgspec

from meshwright.run.serve.engine.doing import Do, Does
from meshwright.run.serve.engine.engine import Engine


class Vectors:
    """Embeds some prompts; used by the thread that takes the engine's turns."""

    def __init__(
        self, engine: Engine, do: Does, prompts: Sequence[Sequence[int]], blank: Do
    ) -> None:
        """Embed each of the prompts by `do`; `blank` says how, without prompt and blocks."""
        self.found: list[list[float]] = []
        """The vectors so far."""
        self._engine, self._do, self._blank = engine, do, blank
        self._prompts = prompts
        self._reserved = 0
        self._left = False
        engine.expected += 1

    def go_on(self) -> bool:
        """Embed as many tokens as a step computes, where there is room; tell whether that is all.

        A prompt that is longer is embedded whole.
        """
        budget = self._engine.limits.batch_tokens
        while len(self.found) < len(self._prompts) and budget > 0:
            prompt = self._prompts[len(self.found)]
            needed = -(-len(prompt) // self._engine.limits.block_tokens)
            while self._reserved < needed and self._engine.batcher.reserve(1):
                self._reserved += 1
            if self._reserved < needed:
                return False
            self.found.append(self._embedded(prompt))
            budget -= len(prompt)
        return len(self.found) == len(self._prompts)

    def leave(self) -> None:
        """Give back what is reserved: all is done, or nobody waits for it any more."""
        if not self._left:
            self._left = True
            self._engine.expected -= 1
            self._give_back()

    def _embedded(self, prompt: Sequence[int]) -> list[float]:
        pool = self._engine.batcher.pool
        blocks, self._reserved = pool.draw(self._reserved), 0
        try:
            return self._do(
                msgspec.structs.replace(self._blank, prompt=tuple(prompt), blocks=tuple(blocks))
            )
        finally:
            pool.release(blocks)
            self._give_back()

    def _give_back(self) -> None:
        # Also where none are: whoever found no room meanwhile has to look again.
        self._engine.batcher.free(self._reserved)
        self._reserved = 0
