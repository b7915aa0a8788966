"""`EmbeddingJob`: prompts that are embedded between an engine's turns, as there is room for them.

    job = lifecycle.start_embedding(prompts)
    while not job.run_step():
        engine.step()

Answers go on meanwhile. Blocks that they leave are kept for the prompt whose turn it is before
somebody else can have them, so that it waits only for those who run.
"""

from collections.abc import Sequence

import msgspec

from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.executor.rank_commands import RankCommand, RankCommandHandler


class EmbeddingJob:
    """Embeds some prompts; used by the thread that takes the engine's turns."""

    def __init__(
        self,
        engine: Engine,
        do: RankCommandHandler,
        prompts: Sequence[Sequence[int]],
        blank: RankCommand,
    ) -> None:
        """Embed each of the prompts by `do`; `blank` says how, without prompt and blocks."""
        self.embeddings: list[list[float]] = []
        """The vectors so far."""
        self._engine, self._do, self._blank = engine, do, blank
        self._prompts = prompts
        self._reserved = 0
        self._left = False
        engine.pending_external_jobs += 1

    def run_step(self) -> bool:
        """Embed as many tokens as a step computes, where there is room; tell whether that is all.

        A prompt that is longer is embedded whole.
        """
        budget = self._engine.scheduler_config.max_num_batched_tokens
        while len(self.embeddings) < len(self._prompts) and budget > 0:
            prompt = self._prompts[len(self.embeddings)]
            needed = -(-len(prompt) // self._engine.scheduler_config.block_size)
            while self._reserved < needed and self._engine.scheduler.reserve_blocks(1):
                self._reserved += 1
            if self._reserved < needed:
                return False
            self.embeddings.append(self._embedded(prompt))
            budget -= len(prompt)
        return len(self.embeddings) == len(self._prompts)

    def cancel(self) -> None:
        """Give back what is reserved: all is done, or nobody waits for it any more."""
        if not self._left:
            self._left = True
            self._engine.pending_external_jobs -= 1
            self._give_back()

    def _embedded(self, prompt: Sequence[int]) -> list[float]:
        pool = self._engine.scheduler.block_pool
        blocks, self._reserved = pool.allocate(self._reserved), 0
        try:
            return self._do(
                msgspec.structs.replace(
                    self._blank, prompt_token_ids=tuple(prompt), blocks=tuple(blocks)
                )
            )
        finally:
            pool.free_blocks(blocks)
            self._give_back()

    def _give_back(self) -> None:
        # Also where none are: whoever found no room meanwhile has to look again.
        self._engine.scheduler.release_reserved_blocks(self._reserved)
        self._reserved = 0
