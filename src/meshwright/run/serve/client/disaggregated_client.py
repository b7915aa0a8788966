"""`DisaggregatedEngineClient`: routes requests to separate prefill and decode engines."""

import asyncio
from collections.abc import Sequence

from meshwright.policy.serving.router import RoutingPolicy
from meshwright.run.serve.client.replica_group import ReplicaGroup
from meshwright.run.serve.client.routed_client import (
    ForwardedStream,
    PrefillDecodeStream,
    RoutedEngineClient,
    _Changed,
    combine_stats,
)
from meshwright.run.serve.engine_client import EngineClient, EngineDeadError
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.request import Request


class DisaggregatedEngineClient(_Changed):
    """Serves with engines that compute prompts and others that write the answers."""

    def __init__(
        self,
        prefill_engines: Sequence[EngineClient],
        decode_engines: Sequence[EngineClient],
        how: RoutingPolicy = "prefix",
        *,
        block_tokens: int = 16,
        kept_blocks: int = 1 << 20,
        weights: str = "",
    ) -> None:
        """Prefill and decode on different engines; `weights` is the folder of their weights."""
        self._prefill = RoutedEngineClient(
            prefill_engines, how, block_tokens=block_tokens, kept_blocks=kept_blocks
        )
        self._decode = RoutedEngineClient(decode_engines, "least-loaded", block_tokens=block_tokens)
        self.max_model_len = min(self._prefill.max_model_len, self._decode.max_model_len)
        self.max_embed_len = min(self._prefill.max_embed_len, self._decode.max_embed_len)
        self._open = 0
        """Asks that have not come to their end, also those that are between the two."""
        self._together = ReplicaGroup([*prefill_engines, *decode_engines], self._busy, weights)

    def generate(self, request: Request) -> "ForwardedStream":
        """Answer; closing what is returned cancels what is left."""
        if changing := self._together.health_problem():
            raise EngineDeadError(changing)
        # Several answers to one prompt share its blocks only where it is computed, and a parcel
        # does not tell how likely the prompt's tokens were.
        alone = request.sampling_params.n > 1 or request.prompt_logprobs is not None
        split = not alone and not self._prefill.health_problem()
        self._open += 1
        return ForwardedStream(
            PrefillDecodeStream(request, self._prefill if split else None, self._decode), self._back
        )

    def _back(self) -> None:
        self._open -= 1

    def _busy(self) -> bool:
        return bool(self._open) or any(
            (*self._prefill.router.open_requests, *self._decode.router.open_requests)
        )

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        where = self._decode if self._prefill.health_problem() else self._prefill
        return await where.embed(prompts, adapter=adapter)

    def stats(self) -> EngineStats:
        """Return what all of them do together."""
        return combine_stats([*self._prefill.engines, *self._decode.engines])

    def health_problem(self) -> str:
        """Say what is wrong where no engine can write answers."""
        return self._together.health_problem() or self._decode.health_problem()

    async def close(self) -> None:
        """Let go of all of them."""
        await asyncio.gather(self._prefill.close(), self._decode.close())
