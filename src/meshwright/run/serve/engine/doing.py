"""`Do`: what all ranks of an engine do between two steps, beside computing."""

from collections.abc import Callable, Collection, Iterator
from typing import Literal

import msgspec
import torch

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.nn.build import Options
from meshwright.run.nn.huggingface import load
from meshwright.run.nn.huggingface.load import misfits
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.interface import MEMORY, Memory
from meshwright.run.serve.model.pooling import Pooling, embed

What = Literal["embed", "sleep", "wake", "update", "versions"]
"""`versions` is for ranks that take weights from elsewhere: `told` is a message that they read."""


class HalfRenewed(MeshwrightError):
    """New weights broke off: an engine with some of them must not answer."""


class Do(msgspec.Struct, frozen=True, tag="do", kw_only=True):
    """One thing to do."""

    what: What
    prompt: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    """Blocks for the prompt to use."""
    pooling: Pooling = "mean"
    adapter: int = -1
    """The slot of the prompt's adapter; -1 for none."""
    level: int = 1
    parts: tuple[Memory, ...] = MEMORY
    """What wakes."""
    path: str = ""
    told: bytes = b""


Does = Callable[[Do], list[float]]
"""Does a thing on one rank, or on all; returns the vector of an embedded prompt."""


class Doer:
    """Does such things with the runner of one rank."""

    def __init__(self, runner: Runner, *, graphs: bool, batch_tokens: int, rows: int) -> None:
        self.runner, self._graphs = runner, graphs
        self._batch_tokens, self._rows = batch_tokens, rows
        self._kept: dict[str, torch.Tensor] = {}
        """Weights in host memory, while it sleeps."""
        self._shapes: dict[str, torch.Size] = {}
        """Of weights that are given back; empty while they are there."""

    def __call__(self, do: Do) -> list[float]:
        """Do one thing; return the vector of an embedded prompt."""
        match do.what:
            case "embed":
                vectors = embed(
                    self.runner.forward, [do.prompt], [do.blocks], pooling=do.pooling,
                    batch_tokens=self._batch_tokens, states=[self._rows], adapter=do.adapter,
                )  # fmt: skip
                found: list[float] = vectors[0].tolist()
                return found
            case "sleep":
                self._sleep(do.level)
            case "wake":
                self._wake(do.parts)
            case "update":
                self._renew(do.path)
            case "versions":
                what = "it was started with ranks that take no versions of weights"
                raise InputError([Problem("engine", what, "start it with ranks that do")])
        return []

    def _renew(self, folder: str) -> None:
        """Read new weights; raises `InputError` while nothing is written, `HalfRenewed` later."""
        decoder = self.runner.forward.decoder
        options = Options(multi_token=bool(decoder.multi_token))
        if problems := misfits(decoder.model, folder, options):
            raise InputError(problems)
        try:
            load(decoder, folder)
        except Exception as error:
            raise HalfRenewed(f"weights of {folder} broke off: {error}") from error

    def _sleep(self, level: int) -> None:
        """Give everything back that is there; one that sleeps may let go of its weights later."""
        for runner in self._runners:
            runner.forget()
            runner.cache.sleep()
        if not self._shapes and level > 0:
            for name, weight in self._weights():
                if level == 1 or _is_draft(name):
                    self._kept[name] = weight.data.to("cpu")
                self._shapes[name] = weight.shape
                # The parameter stays, so that whoever holds it finds the new numbers.
                weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
        elif level > 1:
            self._kept = {name: kept for name, kept in self._kept.items() if _is_draft(name)}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake(self, parts: Collection[Memory]) -> None:
        if "weights" in parts and self._shapes:
            kept, self._kept = self._kept, {}
            for name, weight in self._weights():
                if name in kept:
                    weight.data = kept[name].to(self.runner.cache.device)
                else:
                    weight.data = weight.data.new_zeros(self._shapes[name])
            self._shapes = {}
        if "cache" in parts:
            for runner in self._runners:
                runner.cache.wake()
        # Captured steps have the addresses of both.
        if self._graphs and not self._shapes and not self.runner.cache.asleep:
            self.runner.capture()

    @property
    def _runners(self) -> list[Runner]:
        """The model's, and its draft's where it has one."""
        return [self.runner] if self.runner.draft is None else [self.runner, self.runner.draft]

    def _weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, runner in enumerate(self._runners):
            for name, weight in runner.forward.decoder.named_parameters():
                yield f"{number}.{name}", weight


def _is_draft(name: str) -> bool:
    """Tell whether a weight is a draft's: nobody brings these again."""
    return not name.startswith("0.")


def refuse_new_weights(*, quantised: bool, ranks: int) -> None:
    """Raise where weights cannot be replaced while an engine stands."""
    if quantised:
        what = "weights that were quantised when they were read cannot be replaced one by one"
    elif ranks > 1:
        what = "weights of a folder that ranks share are read when they start"
    else:
        return
    raise InputError([Problem("path", what, "start the engine with the new folder")])
