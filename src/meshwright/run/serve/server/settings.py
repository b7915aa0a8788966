"""`ServerSettings`: what a server is told when it starts; secrets are no part of it."""

from collections import Counter
from pathlib import Path

import msgspec

from meshwright.errors import Problem
from meshwright.run.serve.asked import Sampling
from meshwright.spec.bounds import real, require, whole


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a server listens, what it is called, and how much it takes."""

    model: str
    """The name that requests give; clients see it in `/v1/models`."""
    also_called: tuple[str, ...] = ()
    """Other names of the same model."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the engine: each is a model of its own to clients."""

    host: str = "127.0.0.1"
    """Where to listen; other machines reach it under `0.0.0.0` or an address of this one."""
    port: int = 8000
    """0 takes any free one."""
    origins: tuple[str, ...] = ()
    """Web pages that may call from a browser, such as `https://chat.example.com`; `*` for all."""

    keys_file: Path | None = None
    """Lines of `name: key` or a key alone, beside those of `MESHWRIGHT_API_KEYS`."""
    admin_keys_file: Path | None = None
    """The same for the requests that change the engine, beside `MESHWRIGHT_ADMIN_KEYS`."""
    admin: bool = False
    """Let every client put the engine to sleep and change its weights where no
    admin key is set."""

    body_bytes: int = 16 * 2**20
    """The largest body of a request."""
    head_bytes: int = 64 * 2**10
    """The largest head of a request: its address and its headers."""
    prompt_tokens: int | None = None
    """The longest prompt; None leaves it to the model's context."""
    prompts: int = 256
    """Prompts in one completion or embedding request."""
    choices: int = 16
    """The most answers to one prompt (`n`)."""
    waiting: int = 2048
    """Requests that wait for their first token; more are refused with 429 until some have it."""
    request_s: float = 600.0
    """The longest a request may take, from its first byte to its last."""
    body_s: float = 30.0
    """The longest a client may take to send a body."""
    head_s: float = 30.0
    """The longest a client may take to send a head, from its connection on."""
    unread_s: float = 60.0
    """The longest a client may read nothing of an answer that waits for it."""
    drain_s: float = 60.0
    """How long requests under way may go on after the signal to end."""

    stream_pause_s: float = 0.0
    """Seconds between two writes to a stream: tokens that come meanwhile go out together, which
    spares the processor where steps are shorter than anybody reads."""
    sampling: Sampling = Sampling()
    """What requests get that do not say how to draw tokens: the model's own defaults."""
    tool_format: str | None = None
    """How the model writes tool calls: a name of `sampling.tools`; None looks at its template."""
    reasoning: bool = False
    """Answers begin with thoughts in `<think>`, which chats tell apart from their content."""
    access_log: bool = True
    """A line of JSON for each request, without prompts, answers or keys."""

    def __post_init__(self) -> None:
        require(
            [] if self.model else [Problem("model", "is empty", "name the model")],
            whole("port", self.port, least=0, most=65535),
            whole("body_bytes", self.body_bytes),
            whole("head_bytes", self.head_bytes),
            whole("prompts", self.prompts),
            whole("choices", self.choices, most=128),
            whole("waiting", self.waiting),
            [] if self.prompt_tokens is None else whole("prompt_tokens", self.prompt_tokens),
            real("request_s", self.request_s, 0.001, 1e9),
            real("body_s", self.body_s, 0.001, 1e9),
            real("head_s", self.head_s, 0.001, 1e9),
            real("unread_s", self.unread_s, 0.001, 1e9),
            real("drain_s", self.drain_s, 0, 1e9),
            real("stream_pause_s", self.stream_pause_s, 0, 10),
            self._clashes(),
        )

    def _clashes(self) -> list[Problem]:
        """Say which names stand for two things: requests would get one of them, and never know."""
        twice = sorted(name for name, count in Counter(self.names()).items() if count > 1)
        ours = (self.model, *self.also_called)
        return [
            Problem(
                "adapters" if name in self.adapters else "also_called",
                f"{name} is the served model's name" if name in ours else f"{name} is there twice",
                "give each a name of its own",
            )
            for name in twice
        ]

    def names(self) -> tuple[str, ...]:
        """Return every name a request may give as its model."""
        return (self.model, *self.also_called, *self.adapters)
