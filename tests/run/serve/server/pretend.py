"""An engine without a model and a tokenizer without words, to drive the server with."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.request import FinishReason, Request, RequestOutput, TokenLogprob

END = 256
SIZE = 260


class Bytes:
    """Every byte of UTF-8 is a token; 256 ends a text and 257 begins one."""

    vocab_size = SIZE
    special_token_ids = frozenset({END, 257})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [257] * special + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = (one for one in ids if one < 256 or not skip_special)
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> str:
        if messages[0]["role"] == "alien":
            raise InputError([Problem("messages", "the template knows no role 'alien'")])
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        if tools:
            lines.insert(0, f"tools: {', '.join(tool['function']['name'] for tool in tools)}")
        return "\n".join([*lines, *([""] if values.get("add_generation_prompt") else [])])


def parrot(ask: Request, choice: int) -> str:
    """Say the last line of the prompt again, so that an answer belongs to its prompt alone."""
    said = Bytes().decode(ask.prompt_token_ids).strip().splitlines()[-1]
    return f"{choice}>{said}" if ask.sampling_params.n > 1 else f">{said}"


class Answer:
    """The answer to one ask in the making."""

    def __init__(self, engine: "PretendEngine", ask: Request) -> None:
        self.ask = ask
        self.inbox = OutputStream(ask.sampling_params.n, lambda: engine.leave(self))
        self._engine = engine
        texts = [engine.says(ask, choice) for choice in range(ask.sampling_params.n)]
        self._left = [deque(text.encode()) for text in texts]
        self._count = [0] * ask.sampling_params.n
        self.done = False

    def step(self) -> None:
        """Take one token for each choice that has not ended."""
        for choice, left in enumerate(self._left):
            if self._count[choice] >= 0:
                self.inbox.put(self._next(choice, left))
        self.done = all(count < 0 for count in self._count)

    def _next(self, choice: int, left: deque[int]) -> RequestOutput:
        sampling = self.ask.sampling_params
        first = self._count[choice] == 0
        if self._count[choice] == self._engine.fails_at:
            self._count[choice] = -1
            return RequestOutput(index=choice, finish_reason="error", error="the cat was at it")
        token = left.popleft() if left else END
        self._count[choice] += 1
        finish: FinishReason | None = None
        if token == END:
            finish = "stop"
        elif self._count[choice] == sampling.max_tokens:
            finish = "length"
        if finish:
            self._count[choice] = -1
        top = tuple((min(token + at, 255), -1.0 - at) for at in range(sampling.logprobs or 0))
        asked = self.ask.prompt_logprobs is not None and self._engine.tells_of_prompts
        prompt = self.ask.prompt_token_ids[1:] if asked and first else ()
        return RequestOutput(
            index=choice,
            token_ids=(token,),
            text=chr(token) if token < 128 else "",
            logprobs=(TokenLogprob(token, -math.inf if token == END else -0.5, top),)
            if sampling.logprobs is not None
            else (),
            finish_reason=finish,
            queue_s=0.001 if first else None,
            cached_tokens=2 if first else 0,
            prompt_logprobs=tuple(TokenLogprob(one, -2.0) for one in prompt),
        )


class PretendEngine:
    """Answers many asks, a byte of each at a step."""

    def __init__(
        self, says: Callable[[Request, int], str] = parrot, *, max_length: int = 4096
    ) -> None:
        self.max_model_len = self.max_embed_len = max_length
        self.says = says
        self.refuses: Callable[[Request], bool] | None = None
        self.fails_at = -1
        self.tells_of_prompts = True
        self.running: dict[Answer, None] = {}
        self.asked: list[Request] = []
        self.left: list[Request] = []
        self.held = False
        self.holds_at = -1
        """The step that it stands still after."""
        self.reason = ""
        self.closed = False
        self.steps = 0
        self.output_tokens = 0
        self.sleeps, self.level = False, 0
        self.woken: list[MemoryTag] = []
        """What woke since it slept."""
        self.path = ""
        self._stepping: asyncio.Task[None] | None = None

    def generate(self, ask: Request) -> OutputStream:
        self.asked.append(ask)
        if self.refuses and self.refuses(ask):
            bound = ask.sampling_params.structured_outputs
            where = "structured_outputs" if bound is None else bound.kind
            raise InputError([Problem(where, "cannot be followed")])
        answer = Answer(self, ask)
        self.run(answer)
        return answer.inbox

    def run(self, answer: Answer) -> None:
        self.running[answer] = None
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())

    def leave(self, answer: Answer) -> None:
        self.left.append(answer.ask)
        self.running.pop(answer, None)

    async def _steps(self) -> None:
        while self.running:
            # Two turns of the loop: whoever got a piece has written it before the next comes.
            await asyncio.sleep(0.001 if self.held else 0)
            await asyncio.sleep(0)
            if not self.held:
                self.step()

    def step(self) -> None:
        self.steps += 1
        self.held = self.steps == self.holds_at
        for answer in list(self.running):
            answer.step()
            self.output_tokens += 1
            if answer.done:
                self.running.pop(answer, None)

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        first = 1.0 if adapter is None else 2.0
        return [[first, 0.0, -0.5, float(len(prompt))] for prompt in prompts]

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            steps=self.steps,
            output_tokens=self.output_tokens,
            kv_cache_usage=0.25,
            num_gpu_blocks=16,
            block_size=8,
            running_adapters=tuple(
                {one.ask.lora_name for one in self.running if one.ask.lora_name}
            ),
            extra={"spare_blocks": 7, "odd name": 1, "words": "none"},
        )

    def health_problem(self) -> str:
        return self.reason

    async def close(self) -> None:
        self.closed = True

    async def sleep(self, level: int) -> None:
        self.sleeps, self.woken, self.level = level > 0, [], level

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        self.woken += list(parts)
        self.sleeps = not set(MEMORY_TAGS) <= set(self.woken)

    def is_sleeping(self) -> bool:
        return self.sleeps

    def sleep_level(self) -> int:
        return self.level if self.sleeps else 0

    async def update_weights(self, path: str) -> None:
        if path == "nowhere":
            raise InputError([Problem("path", "nowhere does not exist")])
        self.path = path
