"""`RankCommand`: what all ranks of an engine do between two steps, beside computing."""

from collections.abc import Callable, Collection, Iterator, Mapping
from traceback import clear_frames
from typing import Literal

import msgspec
import torch

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.nn.decoder_builder import BuildOptions
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.nn.huggingface.hf_loader import find_checkpoint_mismatches
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.model.pooling import PoolingType, pool_embeddings

RankCommandName = Literal["embed", "sleep", "wake", "update", "versions"]
"""`versions` is for ranks that take weights from elsewhere; they read its `payload`."""


class PartialUpdateError(MeshwrightError):
    """A change broke off, such as new weights: an engine with some of it must not answer."""


class UpdateRejectedError(MeshwrightError):
    """A change could not be made, by no fault of who asked for it; the engine is as it was."""


class RankCommand(msgspec.Struct, frozen=True, tag="do", kw_only=True):
    """One thing to do."""

    name: RankCommandName
    prompt_token_ids: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    """Blocks for the prompt to use."""
    pooling: PoolingType = "mean"
    lora_slot: int = -1
    """The slot of the prompt's adapter; -1 for none."""
    level: int = 1
    memory_tags: tuple[MemoryTag, ...] = MEMORY_TAGS
    """What wakes."""
    path: str = ""
    payload: bytes = b""


RankCommandHandler = Callable[[RankCommand], list[float]]
"""Does a thing on one rank, or on all; returns the vector of an embedded prompt."""


class ServingCommandHandler:
    """Does such things with the runner of one rank."""

    def __init__(self, runner: ModelRunner, *, graphs: bool, batch_tokens: int, rows: int) -> None:
        self.runner, self._graphs = runner, graphs
        self._batch_tokens, self._rows = batch_tokens, rows
        self._kept: dict[str, torch.Tensor] = {}
        """Weights in host memory, while it sleeps."""
        self._shapes: dict[str, torch.Size] = {}
        """Of weights that are given back; empty while they are there."""

    def __call__(self, do: RankCommand) -> list[float]:
        """Do one thing; return the vector of an embedded prompt."""
        match do.name:
            case "embed":
                vectors = pool_embeddings(
                    self.runner.model, [do.prompt_token_ids], [do.blocks], pooling=do.pooling,
                    batch_tokens=self._batch_tokens, states=[self._rows], adapter=do.lora_slot,
                )  # fmt: skip
                found: list[float] = vectors[0].tolist()
                return found
            case "sleep":
                self._sleep(do.level)
            case "wake":
                self._wake(do.memory_tags)
            case "update":
                self._renew(do.path)
            case "versions":
                what = "it was started with ranks that take no versions of weights"
                raise InputError([Problem("engine", what, "start it with ranks that do")])
        return []

    def _renew(self, folder: str) -> None:
        """Read new weights.

        Raises:
            InputError: where they are not such a model's; nothing is written.
            UpdateRejectedError: where the folder cannot be read; nothing is written.
            PartialUpdateError: where it cannot be read to its end.
        """
        decoder = self.runner.model.decoder
        options = BuildOptions(include_mtp=bool(decoder.multi_token))
        try:
            problems = find_checkpoint_mismatches(decoder.model, folder, options)
        except Exception as error:
            raise UpdateRejectedError(
                f"{folder} cannot be read, and the old weights stay: {error}"
            ) from error
        if problems:
            raise InputError(problems)
        try:
            load_hf_checkpoint(decoder, folder)
        except Exception as error:
            raise PartialUpdateError(f"weights of {folder} broke off: {error}") from error

    def _sleep(self, level: int) -> None:
        """Give everything back that is there; one that sleeps may let go of its weights later."""
        if self._shapes and level > 1:
            self._kept = {name: kept for name, kept in self._kept.items() if _is_draft_weight(name)}
        elif not self._shapes and level > 0:
            try:
                self._kept = {
                    name: weight.data.to("cpu")
                    for name, weight in self._weights()
                    if level == 1 or _is_draft_weight(name)
                }
            except Exception as error:
                what = "host memory does not take its weights, and it stays awake"
                raise UpdateRejectedError(f"{what}: {error}") from error
        for runner in self._runners:
            runner.drop_graphs()
            runner.kv_cache.sleep()
        if not self._shapes and level > 0:
            self._drop_weights()
        _release_cached_memory()

    def _drop_weights(self) -> None:
        self._shapes = {name: weight.shape for name, weight in self._weights()}
        for _, weight in self._weights():
            # The parameter stays, so that whoever holds it finds the new numbers.
            weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)

    def _wake(self, parts: Collection[MemoryTag]) -> None:
        """Take memory again; where there is too little of it, everything that slept sleeps on."""
        shapes = self._shapes if "weights" in parts else {}
        slept = [
            runner for runner in self._runners if "cache" in parts and runner.kv_cache.is_sleeping
        ]
        try:
            self._take_weights(shapes)
            for runner in slept:
                runner.kv_cache.wake_up()
            # Captured steps have the addresses of both.
            if self._graphs and not self._shapes and not self.runner.kv_cache.is_sleeping:
                self.runner.capture()
        except Exception as error:
            clear_frames(error.__traceback__)  # they hold what was taken already
            for runner in self._runners:
                runner.drop_graphs()
            for runner in slept:
                runner.kv_cache.sleep()
            if shapes and not self._shapes:
                self._drop_weights()
            _release_cached_memory()
            raise UpdateRejectedError(f"it cannot wake, and sleeps on: {error}") from error
        if shapes:
            self._kept = {}

    def _take_weights(self, shapes: Mapping[str, torch.Size]) -> None:
        """Give all weights their memory, with what was kept of them; none where one gets none."""
        if not shapes:
            return
        found = {
            name: self._kept[name].to(self.runner.kv_cache.device)
            if name in self._kept
            else weight.data.new_zeros(shapes[name])
            for name, weight in self._weights()
        }
        for name, weight in self._weights():
            weight.data = found[name]
        self._shapes = {}

    @property
    def _runners(self) -> list[ModelRunner]:
        """The model's, and its draft's where it has one."""
        return (
            [self.runner]
            if self.runner.draft_runner is None
            else [self.runner, self.runner.draft_runner]
        )

    def _weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, runner in enumerate(self._runners):
            for name, weight in runner.model.decoder.named_parameters():
                yield f"{number}.{name}", weight


def _release_cached_memory() -> None:
    """Let other processes have memory that nothing lies in."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_draft_weight(name: str) -> bool:
    """Tell whether a weight is a draft's: nobody brings these again."""
    return not name.startswith("0.")


def require_updatable_weights(*, quantised: bool, ranks: int) -> None:
    """Raise where weights cannot be replaced while an engine stands."""
    if quantised:
        what = "weights that were quantised when they were read cannot be replaced one by one"
    elif ranks > 1:
        what = "weights of a folder that ranks share are read when they start"
    else:
        return
    raise InputError([Problem("path", what, "start the engine with the new folder")])
