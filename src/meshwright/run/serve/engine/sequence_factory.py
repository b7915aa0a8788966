"""`SequenceFactory`: the states and sequences of a request, with its stop condition and grammar."""

from collections import abc
from collections.abc import Callable

from meshwright.policy.serving.scheduler import Sequence
from meshwright.run.serve.engine.sequence_state import (
    SequenceState,
    StopCondition,
    TokenStopCondition,
)
from meshwright.run.serve.output.detokenizer import StopChecker
from meshwright.run.serve.request import OutputSink, Request
from meshwright.run.serve.sampling.structured_output import GrammarCompiler, GrammarMatcher
from meshwright.spec.scheduler_config import SchedulerConfig

DetokenizerFactory = Callable[[tuple[str, ...]], Callable[[abc.Sequence[int]], str]]
"""Returns a function from tokens to text, which shows the given special tokens."""


class SequenceFactory:
    """Creates one `SequenceState` and one `Sequence` per choice of a request."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        eos_token_ids: frozenset[int],
        detokenizer_factory: DetokenizerFactory | None,
        grammar_compiler: GrammarCompiler | None,
    ) -> None:
        """Without a detokenizer, outputs stop at tokens only and have no text."""
        self._scheduler_config, self._eos_token_ids = scheduler_config, eos_token_ids
        self._detokenizer_factory = detokenizer_factory
        self._grammar_compiler = grammar_compiler

    @property
    def has_tokenizer(self) -> bool:
        """Whether outputs have text."""
        return self._detokenizer_factory is not None

    def compile_grammar(self, request: Request) -> GrammarMatcher | None:
        """Return the grammar that binds an output of a request; None where there is none."""
        constraint = request.sampling_params.structured_outputs
        if constraint is None or self._grammar_compiler is None:
            return None
        return self._grammar_compiler.compile(constraint)

    def create_state(
        self, request: Request, index: int, max_tokens: int, sink: OutputSink, *,
        lora_slot: int, has_seed: bool, version: int,
    ) -> SequenceState:  # fmt: skip
        """Return the state of one choice of a request."""
        grammar = self.compile_grammar(request)
        stop_condition = self._create_stop_condition(request, max_tokens)
        # A grammar drops draft tokens that it forbids; such a request is sampled as if seeded.
        has_seed = has_seed or grammar is not None
        return SequenceState(
            request, index, max_tokens, sink, stop_condition, grammar=grammar,
            lora_slot=lora_slot, has_seed=has_seed, version=version,
        )  # fmt: skip

    def _create_stop_condition(self, request: Request, max_tokens: int) -> StopCondition:
        sampling = request.sampling_params
        if self._detokenizer_factory is not None:
            detokenize = self._detokenizer_factory(request.visible_special_tokens)
            return StopChecker(detokenize, sampling, tuple(self._eos_token_ids), max_tokens)
        eos = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        stops = frozenset(sampling.stop_token_ids)
        return TokenStopCondition(eos, stops, sampling.min_tokens, max_tokens)

    def create_sequence(self, state: SequenceState, forks: tuple[Sequence, ...] = ()) -> Sequence:
        """Create the sequence that the scheduler sees of a state."""
        request = state.request
        # A cached prefix has no log-probabilities, so requests for them compute the whole prompt.
        reads_cache = (
            self._scheduler_config.enable_prefix_caching and state.prompt_logprobs_collector is None
        )
        state.sequence = Sequence(
            len(request.prompt_token_ids),
            state.max_tokens,
            state=state,
            block_hashes=state.block_hashes if reads_cache else None,
            priority=request.priority,
            tenant=request.tenant,
            forks=forks,
        )
        return state.sequence
