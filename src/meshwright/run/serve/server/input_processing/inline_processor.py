"""`InlineInputProcessor`: requests prepared in this process, for tokenizers that only it has."""

import asyncio

from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    Prepared,
    RequestKind,
)
from meshwright.run.serve.server.input_processing.request_preparer import RequestPreparer
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

THREAD_THRESHOLD_BYTES = 20_000
"""Bytes beyond which a body is prepared in a thread: about a millisecond of other streams."""


class InlineInputProcessor:
    """Prepares requests here: neither their time nor their memory is bounded."""

    def __init__(self, tokenizer: TokenizerLike, config: ServerConfig) -> None:
        self._preparer = RequestPreparer(tokenizer, config)

    async def process(self, kind: RequestKind, body: bytes, limits: InputLimits) -> Prepared:
        """Return what a body asks for; a long one is prepared in a thread."""
        if len(body) <= THREAD_THRESHOLD_BYTES:
            return self._preparer.prepare(kind, body, limits)
        return await asyncio.to_thread(self._preparer.prepare, kind, body, limits)

    async def close(self) -> None:
        """Do nothing: there are no processes."""
