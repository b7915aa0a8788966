"""`ServerConfig`: what a server is told when it starts; secrets are no part of it."""

from collections import Counter
from pathlib import Path

import msgspec

from meshwright.errors import Problem
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.field_checks import check_integer, check_number, raise_problems


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a server listens, what it is called, and how much it takes."""

    model: str
    """The name that requests give; clients see it in `/v1/models`."""
    aliases: tuple[str, ...] = ()
    """Other names of the same model."""
    lora_names: tuple[str, ...] = ()
    """LoRA adapters of the engine: each is a model of its own to clients."""

    host: str = "127.0.0.1"
    """Where to listen; other machines reach it under `0.0.0.0` or an address of this one."""
    port: int = 8000
    """0 takes any free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the `Host` header besides this machine's own, such as `llm.example.com`; `*` for
    all. Where it is empty, the header is checked only by a server on a loopback address."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call from a browser, such as `https://chat.example.com`; `*` for all."""

    api_key_file: Path | None = None
    """Lines of `name: key` or a key alone, beside those of `MESHWRIGHT_API_KEY`."""
    admin_api_key_file: Path | None = None
    """The same for the requests that change the engine, beside `MESHWRIGHT_ADMIN_API_KEY`."""
    allow_unauthenticated_admin: bool = False
    """Let every client put the engine to sleep and change its weights where no
    admin key is set."""

    max_body_bytes: int = 16 * 2**20
    """The largest body of a request."""
    max_header_bytes: int = 64 * 2**10
    """The largest head of a request: its address and its headers."""
    input_processes: int | None = None
    """Processes that prepare requests with bodies up to 128 KiB; None takes one for every four
    cores, at most four. Larger bodies have one more."""
    input_timeout_s: float = 30.0
    """The longest that decoding a body, rendering its chat template and tokenising it may take."""
    input_memory_bytes: int = 2 * 2**30
    """The most memory that this may take."""
    max_prompt_tokens: int | None = None
    """The longest prompt; None leaves it to the model's context."""
    max_prompts_per_request: int = 256
    """Prompts in one completion or embedding request."""
    max_n: int = 16
    """The most answers to one prompt (`n`)."""
    max_queued_requests: int = 2048
    """Requests that wait for their first token; more are refused with 429 until some have it."""
    request_timeout_s: float = 600.0
    """The longest a request may take, from its first byte to its last."""
    body_timeout_s: float = 30.0
    """The longest a client may take to send a body."""
    header_timeout_s: float = 30.0
    """The longest a client may take to send a head, from its connection on."""
    write_timeout_s: float = 60.0
    """The longest a client may read nothing of an answer that waits for it."""
    shutdown_timeout_s: float = 60.0
    """How long requests under way may go on after the signal to end."""

    stream_interval_s: float = 0.0
    """Seconds between two writes to a stream: tokens that come meanwhile go out together, which
    spares the processor where steps are shorter than anybody reads."""
    default_sampling_params: SamplingParams = SamplingParams()
    """What requests get that do not say how to draw tokens: the model's own defaults."""
    tool_call_parser: str | None = None
    """How the model writes tool calls: a name of `output.tool_parsers`; None looks at its
    template."""
    parse_reasoning: bool = False
    """Answers begin with thoughts in `<think>`, which chats tell apart from their content."""
    access_log: bool = True
    """A line of JSON for each request, without prompts, answers or keys."""

    def __post_init__(self) -> None:
        raise_problems(
            [] if self.model else [Problem("model", "is empty", "name the model")],
            check_integer("port", self.port, least=0, most=65535),
            check_integer("max_body_bytes", self.max_body_bytes),
            check_integer("max_header_bytes", self.max_header_bytes),
            check_integer("max_prompts_per_request", self.max_prompts_per_request),
            check_integer("max_n", self.max_n, most=128),
            check_integer("max_queued_requests", self.max_queued_requests),
            []
            if self.max_prompt_tokens is None
            else check_integer("max_prompt_tokens", self.max_prompt_tokens),
            []
            if self.input_processes is None
            else check_integer("input_processes", self.input_processes, most=64),
            check_number("input_timeout_s", self.input_timeout_s, 0.001, 1e9),
            check_integer("input_memory_bytes", self.input_memory_bytes, least=2**26),
            check_number("request_timeout_s", self.request_timeout_s, 0.001, 1e9),
            check_number("body_timeout_s", self.body_timeout_s, 0.001, 1e9),
            check_number("header_timeout_s", self.header_timeout_s, 0.001, 1e9),
            check_number("write_timeout_s", self.write_timeout_s, 0.001, 1e9),
            check_number("shutdown_timeout_s", self.shutdown_timeout_s, 0, 1e9),
            check_number("stream_interval_s", self.stream_interval_s, 0, 10),
            self._clashes(),
        )

    def _clashes(self) -> list[Problem]:
        """Say which names stand for two things: requests would get one of them, and never know."""
        twice = sorted(
            name for name, count in Counter(self.served_model_names()).items() if count > 1
        )
        ours = (self.model, *self.aliases)
        return [
            Problem(
                "lora_names" if name in self.lora_names else "aliases",
                f"{name} is the served model's name" if name in ours else f"{name} is there twice",
                "give each a name of its own",
            )
            for name in twice
        ]

    def served_model_names(self) -> tuple[str, ...]:
        """Return every name a request may give as its model."""
        return (self.model, *self.aliases, *self.lora_names)
