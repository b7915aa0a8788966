"""What is done with an engine between its turns: vectors of prompts, sleep, new weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface import load
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.model.pooling import Pooling, embed


class Upkeep:
    """The other things an engine can do; used by the thread that takes its turns."""

    def __init__(self, engine: Engine, *, graphs: bool = True, quantised: bool = False) -> None:
        self._engine, self._graphs, self._quantised = engine, graphs, quantised
        self._kept: dict[str, Tensor] | None = None
        """Weights in host memory, while it sleeps."""
        self._shapes: dict[str, torch.Size] = {}

    @property
    def asleep(self) -> bool:
        """Whether the engine has given its memory back."""
        return self._engine.runner.cache.asleep

    def embed(
        self, prompts: Sequence[Sequence[int]], *, pooling: Pooling = "mean"
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        found = []
        for prompt in prompts:
            self._check(prompt)
            found += self._embedded(prompt, pooling)
        return found

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the cache back, and of the weights: 1 keeps these in host memory.

        With level 2 the weights are gone, and `update_weights` has to bring some after `wake`.
        """
        self._require_idle("sleep")
        runner = self._engine.runner
        runner.graphs.forget()
        runner.cache.sleep()
        self._engine.batcher.pool.forget()
        self._kept = {}
        for name, weight in runner.forward.decoder.named_parameters():
            if level == 1:
                self._kept[name] = weight.data.to("cpu")
            # The parameter stays, so that whoever holds it finds the new numbers.
            self._shapes[name] = weight.shape
            weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory again, with the weights where they were kept."""
        if not self.asleep:
            return
        runner, kept = self._engine.runner, self._kept or {}
        for name, weight in runner.forward.decoder.named_parameters():
            if name in kept:
                weight.data = kept[name].to(runner.cache.device)
            else:
                weight.data = weight.data.new_zeros(self._shapes[name])
        self._kept = None
        runner.cache.wake()
        if self._graphs:
            runner.capture()

    def update_weights(self, folder: str) -> None:
        """Read the weights of a Hugging Face folder in place of the present ones."""
        self._require_idle("take new weights")
        if self._quantised:
            what = "weights that were quantised when they were read cannot be replaced one by one"
            raise InputError([Problem("path", what, "start the engine with the new folder")])
        load(self._engine.runner.forward.decoder, folder)
        self._engine.batcher.pool.forget()

    def _embedded(self, prompt: Sequence[int], pooling: Pooling) -> list[list[float]]:
        engine, pool = self._engine, self._engine.batcher.pool
        needed = -(-len(prompt) // engine.limits.block_tokens)
        while needed > pool.spare and not engine.is_idle:
            engine.turn()
        pool.promise(needed)
        blocks = pool.draw(needed)
        try:
            vectors = embed(
                engine.runner.forward, [prompt], [blocks], pooling=pooling,
                batch_tokens=engine.limits.batch_tokens, states=[engine.limits.batch_requests],
            )  # fmt: skip
        finally:
            pool.release(blocks)
        found: list[list[float]] = vectors.tolist()
        return found

    def _check(self, prompt: Sequence[int]) -> None:
        vocab, most = self._engine.vocab, self._engine.max_length
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
            what = "holds no token, or one that is none of this model"
            raise InputError([Problem("input", what, f"use ids from 0 to {vocab - 1}")])
        if len(prompt) > most:
            what = f"{len(prompt):,} tokens, at most {most:,} are read"
            raise InputError([Problem("input", what, "shorten it")])

    def _require_idle(self, what: str) -> None:
        if not self._engine.is_idle:
            said = f"cannot {what} while answers are under way"
            raise InputError([Problem("engine", said, "wait for them, or cancel them")])
