"""`start_engine`: from a model on disk to an engine that takes asks, and where the time went."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.engine_config import DEFAULT_SPECULATIVE_TOKENS, EngineConfig
from meshwright.run.serve.engine.executor.executor import Executor
from meshwright.run.serve.engine.executor.multiproc_executor import (
    SERVING_RANKS,
    FollowerRanks,
    MultiprocExecutor,
    RankEntryPoint,
    validate_tensor_parallel,
)
from meshwright.run.serve.engine.executor.rank_commands import (
    PartialUpdateError,
    RankCommand,
    RankCommandHandler,
    UpdateRejectedError,
)
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine.runner_builder import (
    StartupTimer,
    build_runner,
    validate_max_model_len,
)
from meshwright.run.serve.engine.spec_decode.draft_model_proposer import DraftModelProposer
from meshwright.run.serve.engine.spec_decode.ngram_proposer import NgramProposer
from meshwright.run.serve.engine.spec_decode.proposer import DraftProposer
from meshwright.run.serve.kv_transfer.transport import create_kv_sender
from meshwright.run.serve.model.gguf_file import is_gguf, read_context_length
from meshwright.run.serve.model.loader import compute_weights_id
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling.structured_output import GrammarCompiler
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class StartedEngine(NamedTuple):
    """An engine that takes asks."""

    engine: Engine
    lifecycle: EngineLifecycle
    tokenizer: Tokenizer | None
    """None where the weights were drawn and there is no tokenizer."""
    startup_s: tuple[tuple[str, float], ...]
    """What was done until then, and the seconds of each."""


def start_engine(
    source: str | Path | Model,
    settings: EngineConfig,
    *,
    ranks: RankEntryPoint = SERVING_RANKS,
    kv_transfer_folder: str = "",
    lent: Mapping[str, Tensor] | None = None,
) -> StartedEngine:
    """Start an engine for the model at a path, or for a `Model` whose weights are drawn.

    `ranks` is what its ranks can do beside answering; `kv_transfer_folder` is the folder of its KV
    data in shared memory, where whoever starts it removes that when it is gone. `lent` are weights
    of a model in this process that nobody changes: they are used where they lie, and none are read.
    """
    clock = StartupTimer()
    validate_engine_config(source, settings)
    with clock("tokenizer"):
        words = None
        if not isinstance(source, Model) and not settings.random_weights:
            words = load_tokenizer(source)
            if settings.speculative_model:
                _check_draft(words, settings.speculative_model)
    ends = () if words is None else tuple(words.eos_token_ids)
    runner, do, first = _create_executor(source, settings, ends, clock, ranks, lent=lent)
    if runner.kv_cache.device.type == "cuda":
        with clock("first answers"):
            _warm_up_kernels(
                Engine(
                    runner, settings.scheduler_config, proposer=_create_proposer(runner, settings)
                )
            )
    engine = Engine(
        runner,
        settings.scheduler_config,
        eos_token_ids=frozenset() if words is None else words.eos_token_ids,
        detokenizer_factory=None if words is None else words.create_decoder,
        grammar_compiler=None
        if words is None
        else _grammars(words, runner.model.decoder.model.vocab),
        proposer=_create_proposer(runner, settings),
        kv_sender=create_kv_sender(settings.kv_transfer_backend, folder=kv_transfer_folder),
    )
    # Those that are drawn are drawn alike by every engine.
    engine.weights_id = "" if isinstance(source, Model) else compute_weights_id(source)
    quantised = settings.quantization != "none"
    upkeep = EngineLifecycle(
        engine,
        do,
        run_on_first_rank=first,
        quantised=quantised,
        ranks=settings.tensor_parallel_size,
        lent=lent is not None,
    )
    return StartedEngine(engine, upkeep, words, tuple(clock.durations_s))


def validate_engine_config(source: str | Path | Model, settings: EngineConfig) -> None:
    """Raise where a model cannot be served so, before minutes go by in which weights are read."""
    if not isinstance(source, Model) and is_gguf(Path(source)):
        if (context := read_context_length(Path(source))) is not None:
            validate_max_model_len(context, settings)
        return
    model = source if isinstance(source, Model) else load_config(source)
    validate_max_model_len(model.max_positions, settings)
    validate_tensor_parallel(model, settings)


def _create_proposer(runner: Executor, settings: EngineConfig) -> DraftProposer | None:
    """Return what guesses ahead, where something is to."""
    if isinstance(runner, ModelRunner) and runner.draft_runner is not None:
        vocab, most = (
            runner.model.decoder.model.vocab,
            settings.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS,
        )
        return DraftModelProposer(
            runner.draft_runner,
            vocab,
            most,
            max_num_batched_tokens=settings.scheduler_config.max_num_batched_tokens,
        )
    return (
        NgramProposer(settings.num_speculative_tokens) if settings.num_speculative_tokens else None
    )


def _check_draft(tokenizer: Tokenizer, draft: str) -> None:
    """Raise where a draft has other words: its guesses would say something else."""
    ours, its = (each.backend_tokenizer.get_vocab() for each in (tokenizer, load_tokenizer(draft)))
    same = sum(its.get(word) == number for word, number in ours.items())
    # Versions of one tokenizer differ in a few special tokens.
    if same < 0.99 * len(ours):
        what = f"only {same:,} of the model's {len(ours):,} tokens have the same ids in it"
        raise InputError(
            [Problem("speculative_model", what, "use a smaller model of the same family")]
        )


def _warm_up_kernels(engine: Engine) -> None:
    """Answer a few asks, so that all kernels are compiled, or fail, before somebody waits."""
    limits = engine.scheduler_config
    half = max(1, min(limits.max_num_batched_tokens, engine.max_model_len - 4) // 2)
    sampling = SamplingParams(max_tokens=3, top_p=0.9, ignore_eos=True, seed=0)
    # A prompt, the same again beside one that decodes, and one that begins in the cache.
    for length in (half, half, min(half + limits.block_size, engine.max_model_len - 4)):
        engine.add_request(
            Request(prompt_token_ids=(0,) * length, sampling_params=sampling), lambda _: None
        )
        engine.step()
    while not engine.is_idle:
        engine.step()
    engine.scheduler.block_pool.reset_prefix_cache()


def _create_executor(
    source: str | Path | Model,
    settings: EngineConfig,
    ends: tuple[int, ...],
    clock: StartupTimer,
    ranks: RankEntryPoint,
    *,
    lent: Mapping[str, Tensor] | None,
) -> tuple[Executor, RankCommandHandler, RankCommandHandler]:
    """Return what carries out orders on all ranks, and what does other things: on all, on one."""
    if settings.tensor_parallel_size == 1:
        alone = build_runner(source, settings, ends, clock, lent=lent)
        own = ranks.create_handler(alone, settings)
        return alone, own, own
    with clock("ranks"):
        told = source if isinstance(source, Model) else str(source)
        followers = FollowerRanks(told, settings, ends, ranks.module)
    runner = build_runner(source, settings, ends, clock, followers.mesh)
    doer = ranks.create_handler(runner, settings)

    def everywhere(do: RankCommand) -> list[float]:
        followers.broadcast(do)
        try:
            return doer(do)
        except UpdateRejectedError as error:
            raise PartialUpdateError(f"{error}; other ranks may have done it") from error

    return MultiprocExecutor(runner, followers), everywhere, doer


def _grammars(tokenizer: Tokenizer, vocab: int) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer.backend_tokenizer.to_str(), vocab, sorted(tokenizer.eos_token_ids)
    )
