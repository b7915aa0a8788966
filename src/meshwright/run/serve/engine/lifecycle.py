"""What is done with an engine between its turns: vectors of prompts, sleep, new weights."""

from collections.abc import Callable, Collection, Sequence

from meshwright.errors import InputError, Problem
from meshwright.run.serve.engine.embeddings import EmbeddingJob
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.executor.rank_commands import (
    PartialUpdateError,
    RankCommand,
    RankCommandHandler,
    require_updatable_weights,
)
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.model.loader import compute_weights_id
from meshwright.run.serve.model.pooling import PoolingType
from meshwright.spec.name_suggestions import build_unknown_name_problem


class EngineLifecycle:
    """The other things an engine can do; used by the thread that takes its turns."""

    def __init__(
        self,
        engine: Engine,
        run_on_all_ranks: RankCommandHandler,
        *,
        run_on_first_rank: RankCommandHandler | None = None,
        quantised: bool = False,
        ranks: int = 1,
        lent: bool = False,
    ) -> None:
        """Run commands on every rank by `run_on_all_ranks`, on the first by `run_on_first_rank`.

        Weights that are `lent` belong to another owner and stay as they are.
        """
        self._engine, self.run_on_all_ranks, self.run_on_first_rank = (
            engine,
            run_on_all_ranks,
            run_on_first_rank or run_on_all_ranks,
        )
        self._quantised, self._ranks, self._lent = quantised, ranks, lent

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine has given back memory that answers need."""
        return self._engine.is_sleeping

    def embed(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: PoolingType = "mean",
        adapter: str | None = None,
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt, of the model or of one adapter.

        Answers under way go on until there is room for it.
        """
        vectors = self.start_embedding(prompts, pooling=pooling, adapter=adapter)
        try:
            while not vectors.run_step():
                self._engine.step()
        finally:
            vectors.cancel()
        return vectors.embeddings

    def start_embedding(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: PoolingType = "mean",
        adapter: str | None = None,
    ) -> EmbeddingJob:
        """Return the same as work to go on with between turns, and to leave at its end."""
        for prompt in prompts:
            self._check(prompt)
        slot = self._slot(adapter)
        blank = RankCommand(name="embed", pooling=pooling, lora_slot=slot)
        return EmbeddingJob(self._engine, self.run_on_all_ranks, prompts, blank)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the cache back, and of the weights: 1 keeps these in host memory.

        With level 0 weights stay where they are, for engines that share them with somebody. With
        level 2 the weights are gone, and `update_weights` has to bring some after `wake_up`. Who
        sleeps with level 1 can let go of them later, and who is half awake can sleep again.
        """
        self._require_idle("sleep")
        if self._lent and level > 0:
            what = f"{level} gives weights up, which are lent, and nobody would bring them again"
            raise InputError([Problem("level", what, "use 0")])
        self._engine.reset_prefix_cache()
        self.run_on_all_ranks(RankCommand(name="sleep", level=level))

    def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Take the memory of some parts again, with the weights where they were kept.

        New weights may come before the cache wakes: then they find the room that it will have.
        """
        runner = self._engine.runner
        asleep = {"weights": not runner.model.has_weights, "cache": runner.kv_cache.is_sleeping}
        if wakes := tuple(part for part in MEMORY_TAGS if part in parts and asleep[part]):
            self.run_on_all_ranks(RankCommand(name="wake", memory_tags=wakes))

    def update_weights(self, folder: str) -> None:
        """Read the weights of a Hugging Face folder in place of the present ones."""
        self._require_idle("take new weights")
        self._require_room()
        if self._lent:
            what = "its weights are lent, and whoever has them would find others there"
            raise InputError([Problem("engine", what, "start one with weights of its own")])
        require_updatable_weights(quantised=self._quantised, ranks=self._ranks)
        self.run_on_all_ranks(RankCommand(name="update", path=folder))
        self._renewed(self._engine.weights_version + 1, compute_weights_id(folder))

    def update_weights_with(self, version: int, write: Callable[[], object]) -> None:
        """Let `write` put other weights where the present ones lie, and call them `version`.

        Where ranks share the weights it has to write on all of them.
        Where it breaks off the engine answers nobody until another `update_weights_with` has ended
        well.

        Raises:
            PartialUpdateError: where `write` did not end.
        """
        self._require_idle("take new weights")
        self._require_room()
        self._engine.weights_error = (
            f"version {version} of its weights broke off while it was written"
        )
        try:
            write()
        except Exception as error:
            raise PartialUpdateError(f"{self._engine.weights_error}: {error}") from error
        self._renewed(version, f"version {version}")

    def _renewed(self, version: int, weights: str) -> None:
        self._engine.weights_version, self._engine.weights_id = version, weights
        self._engine.weights_error = ""
        self._engine.reset_prefix_cache()

    def _slot(self, adapter: str | None) -> int:
        names = self._engine.lora_slots
        if adapter is not None and adapter not in names:
            raise InputError(
                [build_unknown_name_problem("adapter", adapter, list(names), "lora_name")]
            )
        return self._engine.find_lora_slot(adapter)

    def _check(self, prompt: Sequence[int]) -> None:
        vocab, most = self._engine.vocab_size, self._engine.max_embed_len
        if self.is_sleeping:
            raise InputError([Problem("engine", "is sleeping", "wake it up first")])
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
            what = "holds no token, or one that is none of this model"
            raise InputError([Problem("input", what, f"use ids from 0 to {vocab - 1}")])
        if len(prompt) > most:
            what = f"{len(prompt):,} tokens, at most {most:,} are read"
            raise InputError([Problem("input", what, "shorten it")])

    def _require_room(self) -> None:
        if not self._engine.runner.model.has_weights:
            what = "is sleeping, and has no room for them"
            raise InputError([Problem("engine", what, "wake it up first")])

    def _require_idle(self, what: str) -> None:
        if not self._engine.is_idle or self._engine.pending_external_jobs:
            said = f"cannot {what} while requests are running"
            raise InputError([Problem("engine", said, "wait for them, or cancel them")])
