"""`LLM`: answers to many prompts, offline, without a server.

llm = LLM("path/of/model")
llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8))
llm.chat([{"role": "user", "content": "Hello"}])
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.offline_order import longest_first
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.executor.multiproc_executor import SERVING_RANKS, RankEntryPoint
from meshwright.run.serve.engine.startup import start_engine
from meshwright.run.serve.request import FinishReason, Request, RequestOutput, TokenLogprob
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.spec.model import Model

PromptInput = str | Sequence[int]


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed anew."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """How likely the prompt's tokens after its first were, where the ask wants to know."""

    @property
    def text(self) -> str:
        """The first answer."""
        return self.outputs[0].text


class _ChoiceAccumulator:
    """One choice as far as it has come."""

    __slots__ = ("finish", "logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None

    def choice(self) -> CompletionOutput:
        assert self.finish is not None, "an answer that is read has ended"
        return CompletionOutput(
            text="".join(self.text),
            token_ids=tuple(self.tokens),
            finish_reason=self.finish,
            logprobs=tuple(self.logprobs),
        )


class _OutputAccumulator:
    """What was heard of one ask; pieces are let go, for thousands of them keep Python busy."""

    def __init__(
        self, request: Request, each: Callable[[RequestOutput], None] | None = None
    ) -> None:
        self._ask, self._each = request, each
        self._choices = [_ChoiceAccumulator() for _ in range(request.sampling_params.n)]
        self._first: RequestOutput | None = None

    def __call__(self, output: RequestOutput) -> None:
        self._first = self._first or output
        writing = self._choices[output.index]
        writing.tokens += output.token_ids
        writing.finish = output.finish_reason
        if output.text:
            writing.text.append(output.text)
        if output.logprobs:
            writing.logprobs += output.logprobs
        if self._each is not None:
            self._each(output)

    def completion(self) -> GenerationOutput:
        first = self._first or RequestOutput()
        return GenerationOutput(
            prompt_token_ids=self._ask.prompt_token_ids,
            outputs=tuple(writing.choice() for writing in self._choices),
            cached_tokens=first.cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
        )


class RequestRunner(Protocol):
    """Something that completes requests."""

    def run_requests(self, requests: Sequence[Request]) -> list[GenerationOutput]:
        """Complete requests, all at once."""


class InferenceModel(RequestRunner, Protocol):
    """A model that completes requests: `LLM` is one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template."""

    def validate_request(self, request: Request) -> None:
        """Raise `InputError` where a request cannot be completed at all."""


class LLM:
    """A model that answers in this process."""

    def __init__(
        self,
        model: str | Path | Model,
        settings: EngineConfig | None = None,
        *,
        ranks: RankEntryPoint = SERVING_RANKS,
        lent: Mapping[str, Tensor] | None = None,
        **given: Any,
    ) -> None:
        """Load a model from a path; `given` are fields of `EngineConfig`.

        A `Model` gets random weights: its answers mean nothing, but take as long. Weights that are
        `lent` lie in this process, and are used there. `ranks` is what the engine's ranks can do
        beside answering.
        """
        settings = settings or EngineConfig(**given)
        started = start_engine(model, settings, ranks=ranks, lent=lent)
        self.engine, self.lifecycle, self._words, self.startup_s = started

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._words is None:
            what = "a model with random weights has no tokenizer"
            raise InputError([Problem("prompts", what, "give prompts as tokens")])
        return self._words

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - a frozen value
        *,
        each: Callable[[RequestOutput], None] | None = None,
        adapter: str | None = None,
    ) -> list[GenerationOutput]:
        """Continue prompts, texts or tokens; `each` hears all pieces as they come."""
        several = _several(prompts)
        samplings = (
            [sampling] * len(several) if isinstance(sampling, SamplingParams) else list(sampling)
        )
        if len(samplings) != len(several):
            what = f"{len(samplings)} for {len(several)} prompts"
            raise InputError([Problem("sampling", what, "give one, or one for each prompt")])
        asks = [
            Request(
                prompt_token_ids=self._tokens(prompt), sampling_params=settings, lora_name=adapter
            )
            for prompt, settings in zip(several, samplings, strict=True)
        ]
        return self.run_requests(asks, each=each)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - a frozen value
        *,
        each: Callable[[RequestOutput], None] | None = None,
        adapter: str | None = None,
        **values: Any,
    ) -> GenerationOutput:
        """Answer the last message of a conversation; `values` are for the model's template."""
        text = self.tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": True, **values}
        )
        tokens = tuple(self.tokenizer.encode(text, special=False))
        ask = Request(prompt_token_ids=tokens, sampling_params=sampling, lora_name=adapter)
        return self.run_requests([ask], each=each)[0]

    def validate_request(self, request: Request) -> None:
        """Raise `InputError` where an ask cannot be answered at all."""
        self.engine.validate_request(request)

    def run_requests(
        self, requests: Sequence[Request], *, each: Callable[[RequestOutput], None] | None = None
    ) -> list[GenerationOutput]:
        """Answer asks, all at once; those that may be longest begin first, to end with the rest."""
        for ask in requests:
            self.validate_request(ask)
        heard = [_OutputAccumulator(ask, each) for ask in requests]
        for number in longest_first([self.engine.get_max_output_tokens(ask) for ask in requests]):
            self.engine.add_request(requests[number], heard[number])
        while not self.engine.is_idle:
            self.engine.step()
            for sink, piece in self.engine.take_outputs():
                sink(piece)
        return [one.completion() for one in heard]

    def _tokens(self, prompt: PromptInput) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


def _several(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return prompts as a list: one may come alone, as a text or as its tokens."""
    if isinstance(prompts, str):
        return [prompts]
    found: list[PromptInput] = []
    numbers: list[int] = []
    for each in prompts:
        if isinstance(each, int):
            numbers.append(each)
        else:
            found.append(each)
    return [numbers] if numbers and not found else found
