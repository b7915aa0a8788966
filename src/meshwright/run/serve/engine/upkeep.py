"""What is done with an engine between its turns: vectors of prompts, sleep, new weights."""

from collections.abc import Callable, Collection, Sequence

from meshwright.errors import InputError, Problem
from meshwright.run.serve.engine.doing import Do, Does, HalfRenewed, refuse_new_weights
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.vectors import Vectors
from meshwright.run.serve.interface import MEMORY, Memory
from meshwright.run.serve.model.load import name_of
from meshwright.run.serve.model.pooling import Pooling
from meshwright.spec.names import unknown_name


class Upkeep:
    """The other things an engine can do; used by the thread that takes its turns."""

    def __init__(
        self,
        engine: Engine,
        do: Does,
        *,
        first: Does | None = None,
        quantised: bool = False,
        ranks: int = 1,
        lent: bool = False,
    ) -> None:
        """Use `do`, by which all ranks do a thing; `first` is what the first of them does it by.

        Weights that are `lent` are somebody else's, and stay as they are.
        """
        self._engine, self.do, self.first = engine, do, first or do
        self._quantised, self._ranks, self._lent = quantised, ranks, lent

    @property
    def asleep(self) -> bool:
        """Whether the engine has given back memory that answers need."""
        return self._engine.asleep

    def embed(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: Pooling = "mean",
        adapter: str | None = None,
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt, of the model or of one adapter.

        Answers under way go on until there is room for it.
        """
        vectors = self.vectors(prompts, pooling=pooling, adapter=adapter)
        try:
            while not vectors.go_on():
                self._engine.turn()
        finally:
            vectors.leave()
        return vectors.found

    def vectors(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pooling: Pooling = "mean",
        adapter: str | None = None,
    ) -> Vectors:
        """Return the same as work to go on with between turns, and to leave at its end."""
        for prompt in prompts:
            self._check(prompt)
        slot = self._slot(adapter)
        blank = Do(what="embed", pooling=pooling, adapter=slot)
        return Vectors(self._engine, self.do, prompts, blank)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the cache back, and of the weights: 1 keeps these in host memory.

        With level 0 weights stay where they are, for engines that share them with somebody. With
        level 2 the weights are gone, and `update_weights` has to bring some after `wake`. Who
        sleeps with level 1 can let go of them later, and who is half awake can sleep again.
        """
        self._require_idle("sleep")
        if self._lent and level > 0:
            what = f"{level} gives weights up, which are lent, and nobody would bring them again"
            raise InputError([Problem("level", what, "use 0")])
        self._engine.forget()
        self.do(Do(what="sleep", level=level))

    def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Take the memory of some parts again, with the weights where they were kept.

        New weights may come before the cache wakes: then they find the room that it will have.
        """
        runner = self._engine.runner
        asleep = {"weights": not runner.forward.has_weights, "cache": runner.cache.asleep}
        if wakes := tuple(part for part in MEMORY if part in parts and asleep[part]):
            self.do(Do(what="wake", parts=wakes))

    def update_weights(self, folder: str) -> None:
        """Read the weights of a Hugging Face folder in place of the present ones."""
        self._require_idle("take new weights")
        self._require_room()
        if self._lent:
            what = "its weights are lent, and whoever has them would find others there"
            raise InputError([Problem("engine", what, "start one with weights of its own")])
        refuse_new_weights(quantised=self._quantised, ranks=self._ranks)
        self.do(Do(what="update", path=folder))
        self._renewed(self._engine.version + 1, name_of(folder))

    def renew(self, version: int, write: Callable[[], object]) -> None:
        """Let `write` put other weights where the present ones lie, and call them `version`.

        Where ranks share the weights it has to write on all of them.
        Where it breaks off the engine answers nobody until another `renew` has ended well.

        Raises:
            HalfRenewed: where `write` did not end.
        """
        self._require_idle("take new weights")
        self._require_room()
        self._engine.unfit = f"version {version} of its weights broke off while it was written"
        try:
            write()
        except Exception as error:
            raise HalfRenewed(f"{self._engine.unfit}: {error}") from error
        self._renewed(version, f"version {version}")

    def _renewed(self, version: int, weights: str) -> None:
        self._engine.version, self._engine.weights = version, weights
        self._engine.unfit = ""
        self._engine.forget()

    def _slot(self, adapter: str | None) -> int:
        names = self._engine.adapters
        if adapter is not None and adapter not in names:
            raise InputError([unknown_name("adapter", adapter, list(names), "adapter")])
        return self._engine.slot_of(adapter)

    def _check(self, prompt: Sequence[int]) -> None:
        vocab, most = self._engine.vocab, self._engine.embed_length
        if self.asleep:
            raise InputError([Problem("engine", "it sleeps", "wake it")])
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
            what = "holds no token, or one that is none of this model"
            raise InputError([Problem("input", what, f"use ids from 0 to {vocab - 1}")])
        if len(prompt) > most:
            what = f"{len(prompt):,} tokens, at most {most:,} are read"
            raise InputError([Problem("input", what, "shorten it")])

    def _require_room(self) -> None:
        if not self._engine.runner.forward.has_weights:
            raise InputError([Problem("engine", "it sleeps, and has no room for them", "wake it")])

    def _require_idle(self, what: str) -> None:
        if not self._engine.is_idle or self._engine.expected:
            said = f"cannot {what} while answers are under way"
            raise InputError([Problem("engine", said, "wait for them, or cancel them")])
