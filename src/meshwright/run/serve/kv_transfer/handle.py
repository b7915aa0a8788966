"""`KVTransferHandle`: where the bytes of a KV transfer are, and the interface of their senders."""

from typing import Literal, Protocol

import msgspec

from meshwright.errors import MeshwrightError

KVTransport = Literal["shm", "tcp", "nixl"]
HANDLE_TTL_S = 120.0


class KVTransferError(MeshwrightError):
    """KV transfer failed: the sender is gone, or kept the blocks no longer."""


class KVTransferHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the keys and values of a prompt lie."""

    transport: KVTransport
    address: str
    """The file, HOST:PORT, or AGENT@ADDRESS."""
    secret: str = ""
    """What fetches it, over TCP and NIXL."""
    nixl_metadata: bytes = b""
    """How to reach the agent, over NIXL."""
    num_blocks: int
    size_bytes: int
    """Bytes of all blocks."""
    first_token_id: int
    """The token that was drawn behind the prompt."""
    first_token_logprob: tuple[float, tuple[tuple[int, float], ...]] | None = None
    """How likely that token was, and which were likely in its place; where it was asked."""
    weights_id: str = ""
    """What the weights are called that made them: whoever has others computes the prompt anew."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed anew."""
    queue_s: float | None = None
    """Seconds that the ask waited where the prompt was computed, where known."""


class KVSender(Protocol):
    """Sends parcels."""

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> KVTransferHandle:
        """Keep bytes until they are collected; return where they lie."""

    def close(self) -> None:
        """Drop what was not collected."""
