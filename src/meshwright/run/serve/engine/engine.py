"""`Engine`: carries the scheduler's decisions out on an executor, one step ahead of their results.

A turn decides a step and starts it, then reads the tokens of the step before. So the device has
its next step before the host has looked at the last one, and an answer's end is seen one step late:
what was computed for it meanwhile is thrown away. A step with parts of prompts takes the host long
to start: tokens that are there by then are read first. Where a grammar says which tokens may
follow, the step before is read between computing and sampling. With speculative decoding, and on a
processor, it is read before the next is decided.

An engine is used by one thread; `EngineWorker` feeds it from others.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.scheduler import Scheduler
from meshwright.run.serve.engine.executor.executor import Executor
from meshwright.run.serve.engine.input_batch import InputBatch, SampledRow
from meshwright.run.serve.engine.kv_connector import KVConnector
from meshwright.run.serve.engine.logprobs import (
    PromptLogprobsCollector,
    collect_token_logprobs,
    distribute_prompt_logprobs,
)
from meshwright.run.serve.engine.model_runner.model_runner import PendingOutput
from meshwright.run.serve.engine.request_validation import EngineCapabilities, validate_request
from meshwright.run.serve.engine.sequence_factory import DetokenizerFactory, SequenceFactory
from meshwright.run.serve.engine.sequence_state import (
    SequenceState,
)
from meshwright.run.serve.engine.spec_decode.proposer import DraftProposer, SpecDecoder
from meshwright.run.serve.engine.stats import EngineCounters, LoRARequestStats
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.kv_transfer.handle import KVSender, KVTransferError, KVTransferHandle
from meshwright.run.serve.request import OutputSink, Request, RequestOutput, TokenLogprob
from meshwright.run.serve.sampling.grammar_bitmask import GrammarBitmask
from meshwright.run.serve.sampling.structured_output import GrammarCompiler
from meshwright.spec.scheduler_config import SchedulerConfig


class _InFlightStep(NamedTuple):
    """A step whose tokens have not been read."""

    drawing: list[SampledRow]
    landing: PendingOutput


class Engine:
    """Answers many asks at a time."""

    def __init__(
        self,
        runner: Executor,
        scheduler_config: SchedulerConfig,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        detokenizer_factory: DetokenizerFactory | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        proposer: DraftProposer | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        kv_sender: KVSender | None = None,
    ) -> None:
        """Serve with a runner whose cache has its blocks.

        `eos_token_ids` end every output, unless a request ignores them; `proposer` lets a step
        verify several draft tokens of a sequence; `tenant_weights` divide steps among tenants;
        `kv_sender` sends KV blocks to other engines, by default through shared memory.
        """
        if runner.model.has_recurrent_state:
            # What lies in blocks is not all there is to know of a beginning.
            scheduler_config = msgspec.structs.replace(
                scheduler_config, enable_prefix_caching=False
            )
            if scheduler_config.preemption_mode == "swap":
                what = "states of recurrent layers are not moved to host memory"
                raise InputError([Problem("preemption_mode", what, "use recompute, the default")])
            if proposer is not None:
                what = "recurrent states cannot be rolled back when a draft token is rejected"
                fix = "serve this model without"
                raise InputError([Problem("num_speculative_tokens", what, fix)])
        self.runner, self.scheduler_config = runner, scheduler_config
        self.eos_token_ids = eos_token_ids
        self._factory = SequenceFactory(
            scheduler_config, eos_token_ids, detokenizer_factory, grammar_compiler
        )
        self.scheduler = Scheduler(
            scheduler_config,
            runner.kv_cache.num_blocks,
            tenant_weights=tenant_weights,
            speculative=proposer is not None,
        )
        room = runner.kv_cache.num_blocks * scheduler_config.block_size
        # The last token of an answer is kept nowhere; those of an embedded prompt all are.
        self.max_model_len = min(runner.model.max_model_len, room + 1)
        self.max_embed_len = min(runner.model.max_model_len, room)
        self.vocab_size = runner.model.decoder.model.vocab
        self.weights_version = 0
        """Of the weights: 0 are those it began with. Prefixes are found under their own alone."""
        self.weights_id = ""
        """What these weights are called by whoever has the same, however often they changed."""
        self.pending_external_jobs = 0
        """Jobs outside the scheduler, for which weights and cache have to stay."""
        self.weights_error = ""
        """Why nothing may be asked, where its weights are parts of two versions."""
        self._placing = InputBatch(self.scheduler, scheduler_config.max_num_seqs)
        self._spec_decoder = None if proposer is None else SpecDecoder(proposer, self.scheduler)
        self._handing = KVConnector(runner.kv_cache, kv_sender)
        self._masks: GrammarBitmask | None = None
        self._flying: _InFlightStep | None = None
        self._outbox: list[tuple[OutputSink, RequestOutput]] = []
        self._counts, self._adapting = EngineCounters(), LoRARequestStats()
        self._progress_s = time.monotonic()

    def add_request(
        self, request: Request, sink: OutputSink, brought: bytes | bytearray | None = None
    ) -> list[SequenceState]:
        """Take an ask; its pieces go to the sink, in the thread that takes turns.

        `brought` are the keys and values of an ask that comes with them.

        Raises:
            InputError: where it cannot be answered at all.
            KVTransferError: where other weights made what it comes with.
        """
        self.validate_request(request)
        sampling, seeded = request.sampling_params, request.sampling_params.seed is not None
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
            request = msgspec.structs.replace(request, sampling_params=sampling)
        most = 1 if request.do_remote_decode else self.get_max_output_tokens(request)
        answers = [
            self._create_state(request, choice, most, sink, has_seed=seeded)
            for choice in range(sampling.n)
        ]
        answers[0].hash_full_blocks(self.scheduler_config.block_size)
        for answer in answers[1:]:
            answer.block_hashes = list(answers[0].block_hashes)
        if request.remote_kv is not None:
            self._go_on_with(answers[0], request.remote_kv, brought)
            self._adapting.add(answers)
            return answers
        if request.prompt_logprobs is not None:
            apart = self.runner.model.has_recurrent_state
            telling = [
                PromptLogprobsCollector(request.prompt_token_ids, request.prompt_logprobs)
                for _ in answers
            ]
            for answer, own in zip(answers, telling, strict=True):
                # Who computes a prompt by itself tells by itself.
                answer.prompt_logprobs_collector = own if apart else telling[0]
        others = tuple(self._factory.create_sequence(answer) for answer in answers[1:])
        if self.runner.model.has_recurrent_state:
            # States are no blocks: each choice computes its own.
            for sequence in (self._factory.create_sequence(answers[0]), *others):
                self.scheduler.add(sequence)
        else:
            self.scheduler.add(self._factory.create_sequence(answers[0], others))
        self._adapting.add(answers)
        return answers

    def get_max_output_tokens(self, request: Request) -> int:
        """Return how many tokens an answer may have at most."""
        most = request.sampling_params.max_tokens
        room = self.max_model_len - len(request.prompt_token_ids)
        return room if most is None else min(most, room)

    def _go_on_with(
        self, state: SequenceState, handle: KVTransferHandle, brought: bytes | bytearray | None
    ) -> None:
        """Go on where another engine has computed the prompt and drawn a token."""
        if handle.weights_id != self.weights_id:
            raise KVTransferError("KV transfer failed: computed with other weights")
        sequence = self._factory.create_sequence(state)
        sequence.num_computed_tokens, sequence.num_cached_tokens = (
            len(state.request.prompt_token_ids),
            handle.cached_tokens,
        )
        state.received_kv, state.queue_s = brought, handle.queue_s
        logprob = handle.first_token_logprob
        told = () if logprob is None else (TokenLogprob(handle.first_token_id, *logprob),)
        piece = state.append((handle.first_token_id,), told)
        self._counts.output_tokens += 1
        self._outbox.append((state.sink, piece))
        if piece.finish_reason is None:
            self.scheduler.add(sequence)

    def validate_request(self, request: Request) -> None:
        """Raise `InputError` where an ask cannot be answered at all; any thread may call it."""
        if self.weights_error:
            raise InputError([Problem("engine", self.weights_error, "give it whole weights")])
        validate_request(request, self.capabilities)
        self._factory.compile_grammar(request)

    @property
    def capabilities(self) -> EngineCapabilities:
        """What can be asked of this engine."""
        return EngineCapabilities(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            lora_names=tuple(self.lora_slots),
            has_tokenizer=self._factory.has_tokenizer,
            is_sleeping=self.is_sleeping,
            supports_kv_transfer=self.supports_kv_transfer,
            block_size=self.scheduler_config.block_size,
            block_bytes=self.runner.kv_cache.block_bytes,
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether it has given back memory that answers need."""
        return self.runner.kv_cache.is_sleeping or not self.runner.model.has_weights

    @property
    def supports_kv_transfer(self) -> bool:
        """Whether keys and values can go to another engine, or come from one."""
        alone = self.runner.tensor_parallel_size == 1
        return alone and not self.runner.model.has_recurrent_state and self._spec_decoder is None

    def abort(self, states: list[SequenceState]) -> None:
        """End answers that nobody waits for any more."""
        for answer in states:
            if answer.finish_reason is None:
                self._outbox.append((answer.sink, answer.abort()))
                self._finish(answer)

    def _create_state(
        self, request: Request, index: int, max_tokens: int, sink: OutputSink, *, has_seed: bool
    ) -> SequenceState:
        return self._factory.create_state(
            request, index, max_tokens, sink, has_seed=has_seed,
            lora_slot=self.find_lora_slot(request.lora_name), version=self.weights_version,
        )  # fmt: skip

    @property
    def lora_slots(self) -> Mapping[str, int]:
        """The slot of each adapter that can be asked for."""
        return {} if self.runner.lora_manager is None else self.runner.lora_manager.slots_by_name

    def find_lora_slot(self, adapter: str | None) -> int:
        """Return the slot of an adapter, or of what is usual; -1 is the model by itself."""
        if adapter is not None:
            return self.lora_slots[adapter]
        return -1 if self.runner.lora_manager is None else self.runner.lora_manager.default_slot

    def close(self) -> None:
        """Let go of what others might have collected, and of threads."""
        if self._masks is not None:
            self._masks.close()
        self._handing.close()

    # Turns.

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.scheduler.num_running or self.scheduler.waiting_queue or self._flying)

    def step(self) -> bool:
        """Start a step and read the one before; return whether there was anything to do."""
        flying, self._flying = self._flying, None
        if flying is not None and (
            self._spec_decoder is not None or flying.landing.computed_on_host
        ):
            self._process_output(flying)
            flying = None
        if self._spec_decoder is not None:
            self._spec_decoder.plan_drafts()
        batch = self.scheduler.schedule()
        if batch is None:
            if flying is not None:
                self._process_output(flying)
            return flying is not None
        granted = self.scheduler.allocate_blocks(batch)
        if self._spec_decoder is not None:
            self._spec_decoder.propose_drafts(batch)
        orders, drawing = self._placing.build_model_input(batch, granted)
        if arrived := self._handing.take_received(batch):
            orders = msgspec.structs.replace(orders, received_blocks=arrived)
        if flying is not None and orders.chunks and flying.landing.is_ready:
            self._process_output(flying)
            flying = None
        computed = self.runner.execute_model(orders)
        tellers = (each.sequence.state.prompt_logprobs_collector for each in batch.chunks)
        distribute_prompt_logprobs(tellers, orders.chunks, self.runner.prompt_logprobs)
        if flying is not None and any(each.state.grammar is not None for each in drawing):
            self._process_output(flying)
            flying = None
        if computed is not None:
            self._handing.gather_blocks(each.state for each in drawing)
            mask = self._mask(drawing, computed.sampling_metadata.row_ends)
            if self._spec_decoder is not None:
                chances = self._spec_decoder.proposer.draft_probs(
                    drawing, computed.sampling_metadata.row_ends
                )
                computed = replace(computed, draft_probs=chances)
            self._flying = _InFlightStep(drawing, self.runner.sample_tokens(computed, mask))
        self._counts.record_step(batch)
        if flying is not None:
            self._process_output(flying)
        self._progress_s = time.monotonic()
        return True

    def take_outputs(self) -> list[tuple[OutputSink, RequestOutput]]:
        """Take the pieces that are ready, with where they go."""
        ready, self._outbox = self._outbox, []
        return ready

    def stats(self) -> EngineStats:
        """Return what the engine does at this moment."""
        pool, batcher = self.scheduler.block_pool, self.scheduler
        return EngineStats(
            running=batcher.num_running,
            waiting=len(batcher.waiting_queue),
            kv_cache_usage=pool.used_block_count / pool.size,
            prefix_queries=batcher.prefix_cache.queried_tokens,
            prefix_hits=batcher.prefix_cache.hit_tokens,
            preemptions=batcher.num_preemptions,
            since_last_step_s=None if self.is_idle else time.monotonic() - self._progress_s,
            num_gpu_blocks=pool.size,
            block_size=self.scheduler_config.block_size,
            enable_prefix_caching=self.scheduler_config.enable_prefix_caching,
            **self._adapting.snapshot(),
            **self._counts.snapshot(),
        )

    def _mask(self, drawing: list[SampledRow], ends: tuple[int, ...]) -> Tensor | None:
        """Return which tokens grammars allow at each line; None where there are none."""
        guides = [
            (
                ends[place - 1] if place else 0,
                answer.grammar,
                answer.draft_token_ids if checks else (),
            )
            for place, (answer, checks) in enumerate(drawing)
            if answer.grammar is not None and answer.finish_reason is None
        ]
        if not guides:
            return None
        if self._masks is None:
            self._masks = GrammarBitmask(self.vocab_size, self.runner.kv_cache.device)
        self._masks.start_fill(guides, ends[-1])
        return self._masks.result()

    # Results.

    def _process_output(self, flying: _InFlightStep) -> None:
        """Read the tokens of a step."""
        tokens, told = flying.landing.wait()
        likely = {}
        if told is not None:
            asked = [answer.request.sampling_params.logprobs for answer, _ in flying.drawing]
            likely = collect_token_logprobs(asked, flying.landing.sampling_metadata, tokens, told)
        for place, drawing in enumerate(flying.drawing):
            answer = drawing.state
            if answer.finish_reason is not None:
                continue
            if not answer.has_output and answer.index == 0:
                # Once for each ask, as it begins: not what is computed anew, nor guesses.
                self._counts.prompt_tokens += len(answer.request.prompt_token_ids)
            if answer.packed_kv is not None:
                told_here = likely.get(place, ())
                sent = self._handing.send_kv(answer, tokens[place][0], self.weights_id, told_here)
                self._outbox.append((answer.sink, sent))
                self._finish(answer)
                continue
            if drawing.verifies_drafts and answer.draft_token_ids:
                self._counts.record_draft(len(answer.draft_token_ids), len(tokens[place]) - 1)
            piece = answer.append(tokens[place], likely.get(place, ()))
            self._counts.output_tokens += len(piece.token_ids)
            self._outbox.append((answer.sink, piece))
            if piece.finish_reason is not None:
                self._finish(answer)
                continue
            if self.scheduler_config.enable_prefix_caching:
                answer.hash_full_blocks(self.scheduler_config.block_size)
            if self._spec_decoder is not None:
                self._spec_decoder.record_accepted(drawing, len(tokens[place]))

    def _finish(self, state: SequenceState) -> None:
        """Take an answer out that goes on no further."""
        self._adapting.remove(state)
        self._placing.remove(state)
        self.scheduler.finish(state.sequence)
        if self._spec_decoder is not None:
            self._spec_decoder.remove(state)

    def reset_prefix_cache(self) -> None:
        """Find nothing of what lies in the blocks any more: the weights or the cache change."""
        self.scheduler.block_pool.reset_prefix_cache()
        if self._spec_decoder is not None:
            self._spec_decoder.proposer.reset()
