"""`start_engine`: from a model on disk to an engine that takes asks, and where the time went."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.build import Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.initialise import materialise
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.guessing import LookedUp
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.model.cache import PagedCache, block_bytes, shapes_of
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.load import load_served
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.step import Row, step_of
from meshwright.run.serve.model.words import Words, load_words
from meshwright.run.serve.sampling.grammar import Grammars
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HOST_CACHE_BYTES = 1 << 30
"""What the cache may take on a processor, where nobody says how many blocks it has."""


class Started(NamedTuple):
    """An engine that takes asks."""

    engine: Engine
    upkeep: Upkeep
    words: Words | None
    """None where the weights were drawn and there is no tokenizer."""
    took: tuple[tuple[str, float], ...]
    """What was done until then, and the seconds of each."""


class _Clock:
    """Writes down what took how long."""

    def __init__(self) -> None:
        self.took: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.took.append((what, time.perf_counter() - start))


def start_engine(source: str | Path | Model, settings: EngineSettings) -> Started:
    """Start an engine for the model at a path, or for a `Model` whose weights are drawn."""
    clock = _Clock()
    device = _device(settings.device)
    with clock("device"):
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.zeros(1, device=device)
    named = "bf16" if device.type == "cuda" else "fp32"
    dtype = _DTYPES[named if settings.precision == "auto" else settings.precision]
    with clock("words"):
        words = None
        if not isinstance(source, Model) and not settings.random_weights:
            words = load_words(source)
    with clock("weights"):
        decoder = _decoder(source, settings, device, dtype)
    if settings.weights != "model":
        with clock("quantising"):
            quantise(decoder, settings.weights)
    runner = _runner(decoder, settings, device, clock, words)
    with clock("graphs"):
        if settings.graphs:
            runner.capture()
    engine = Engine(
        runner,
        settings.limits,
        ends=frozenset() if words is None else words.ends,
        decode=None if words is None else words.decode,
        grammars=None if words is None else _grammars(words, decoder.model.vocab),
        guesses=LookedUp(settings.guesses) if settings.guesses else None,
    )
    upkeep = Upkeep(engine, graphs=settings.graphs, quantised=settings.weights != "model")
    return Started(engine, upkeep, words, tuple(clock.took))


def _grammars(words: Words, vocab: int) -> Grammars:
    return Grammars(words.tokenizer.to_str(), vocab, sorted(words.ends))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError([Problem("device", str(error), "use cuda or cpu")]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError([Problem("device", "torch sees no GPU here", "use cpu")])
    return device


def _decoder(
    source: str | Path | Model, settings: EngineSettings, device: torch.device, dtype: torch.dtype
) -> Decoder:
    if not isinstance(source, Model):
        if not settings.random_weights:
            return load_served(source, device=device, dtype=dtype)
        source = load_config(Path(source))
    decoder = build(source, device="meta", dtype=dtype, options=Options(multi_token=False))
    materialise(decoder, device, seed=0)
    return decoder.eval().requires_grad_(False)


def _runner(
    decoder: Decoder,
    settings: EngineSettings,
    device: torch.device,
    clock: _Clock,
    words: Words | None,
) -> Runner:
    limits, model = settings.limits, decoder.model
    length = min(settings.max_length or model.max_positions, model.max_positions)
    rows = limits.batch_requests
    ends = () if words is None else tuple(words.ends)
    sampler = Sampler(rows + 1, model.vocab, device, eos=ends)
    with clock("memory"):
        blocks = limits.kv_blocks or _blocks(decoder, settings, device, length)
    if blocks < 1:
        what = "the weights leave no memory for keys and values"
        raise InputError([Problem("memory_share", what, "use a larger share or smaller weights")])
    with clock("cache"):
        cache = PagedCache(
            decoder, blocks, limits.block_tokens, fp8=limits.kv_precision == "fp8",
            host_blocks=limits.host_blocks,
        )  # fmt: skip
        forward = Forward(decoder, cache, max_length=length, state_rows=rows + 1)
    adapters = None
    if settings.adapters:
        with clock("adapters"):
            slots, rank = len(settings.adapters), settings.adapter_rank
            adapters = Adapters(forward, slots=slots, rank=rank)
            for name, folder in settings.adapters.items():
                adapters.load(name, folder)
    return Runner(forward, sampler, rows, adapters)


def _blocks(decoder: Decoder, settings: EngineSettings, device: torch.device, length: int) -> int:
    """Return how many blocks fit beside the weights and the largest step."""
    limits = settings.limits
    dtype = (
        torch.float8_e4m3fn if limits.kv_precision == "fp8" else next(decoder.parameters()).dtype
    )
    each = block_bytes(shapes_of(decoder), limits.block_tokens, dtype)
    enough = limits.batch_requests * -(-length // limits.block_tokens)
    if not each:
        return enough
    if device.type != "cuda":
        return min(enough, max(_HOST_CACHE_BYTES // each, -(-length // limits.block_tokens)))
    peak = _largest_step(decoder, settings, device, length)
    _, total = torch.cuda.mem_get_info(device)
    room = settings.memory_share * total - peak - _elsewhere(device)
    return min(enough, int(room // each))


def _largest_step(
    decoder: Decoder, settings: EngineSettings, device: torch.device, length: int
) -> int:
    """Return the most memory that a step takes, weights included, by computing one."""
    limits = settings.limits
    longest = min(length, limits.batch_tokens)
    per_row = -(-longest // limits.block_tokens)
    cache = PagedCache(decoder, per_row, limits.block_tokens)
    forward = Forward(decoder, cache, max_length=length, state_rows=limits.batch_requests + 1)
    torch.cuda.reset_peak_memory_stats(device)
    counts = [longest] * (limits.batch_tokens // longest)
    rows = [Row([0] * count, 0, range(per_row)) for count in counts]
    forward.run(step_of(rows, limits.block_tokens, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    # Logits of every row in fp32, once to change and once for what is drawn from.
    peak += 2 * 4 * limits.batch_requests * decoder.model.vocab
    del forward, cache
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _elsewhere(device: torch.device) -> int:
    """Return what others and the libraries have of the device's memory."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
