"""`build_runner`: the runner of one rank, from the model's weights to its captured graphs."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.build import Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface import load
from meshwright.run.nn.initialise import materialise
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.spread import spread
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import GUESSES, EngineSettings
from meshwright.run.serve.model.cache import FP8, PagedCache, block_bytes, shapes_of
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.gguf_file import is_gguf
from meshwright.run.serve.model.load import load_served
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.model.peft_folder import uses_dora
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.step import Row, step_of
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HOST_CACHE_BYTES = 1 << 30
"""What the cache may take on a processor, where nobody says how many blocks it has."""
_SERVED = Options(multi_token=False)


class Clock:
    """Writes down what took how long."""

    def __init__(self) -> None:
        self.took: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.took.append((what, time.perf_counter() - start))


def device_of(name: str, rank: int = 0) -> torch.device:
    """Return the device that a rank serves on."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError([Problem("device", str(error), "use cuda or cpu")]) from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise InputError([Problem("device", "torch sees no GPU here", "use cpu")])
    number, count = (device.index or 0) + rank, torch.cuda.device_count()
    if number >= count:
        what = f"GPU {number} is asked for, torch sees {count}"
        raise InputError([Problem("device", what, "use fewer ranks, or another device")])
    return torch.device("cuda", number)


def check_length(context: int, settings: EngineSettings) -> None:
    """Raise where prompts with their answers are to be longer than the model's context."""
    if settings.max_length is not None and settings.max_length > context:
        what = f"{settings.max_length:,} is more than the {context:,} tokens of the model's context"
        fix = f"use at most {context}, or leave it out"
        raise InputError([Problem("max_length", what, fix)])


def build_runner(
    source: str | Path | Model,
    settings: EngineSettings,
    ends: tuple[int, ...],
    clock: Clock,
    mesh: Mesh | None = None,
    *,
    lent: Mapping[str, Tensor] | None = None,
) -> Runner:
    """Return a runner that is ready; with a mesh, every rank of it does so at the same point.

    It uses weights that are `lent` where they lie, by the names of a decoder's parameters.
    """
    device = device_of(settings.device, 0 if mesh is None else mesh.rank)
    with clock("device"):
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
    named = "bf16" if device.type == "cuda" else "fp32"
    dtype = _DTYPES[named if settings.precision == "auto" else settings.precision]
    with clock("weights"):
        if lent is None:
            decoder, held = _decoder(source, settings, device, dtype, mesh)
        else:
            decoder, held = _sharing(source, lent, dtype), None
    if settings.weights != "model":
        with clock("quantising"):
            quantise(decoder, settings.weights)
    draft = None
    if settings.draft:
        with clock("draft"):
            draft, _ = _decoder(settings.draft, settings, device, dtype, None)
    limits, model = settings.limits, decoder.model
    check_length(model.max_positions, settings)
    length = settings.max_length or model.max_positions
    rows = limits.batch_requests
    sampler = Sampler(rows + 1, model.vocab, device, eos=ends)
    with clock("memory"):
        blocks = limits.kv_blocks or _least(_blocks(decoder, draft, settings, device, length), mesh)
    if blocks < 1:
        what = "the weights leave no memory for keys and values"
        raise InputError([Problem("memory_share", what, "use a larger share or smaller weights")])
    with clock("cache"):
        cache = PagedCache(
            decoder, blocks, limits.block_tokens, fp8=limits.kv_precision == "fp8",
            host_blocks=limits.host_blocks,
        )  # fmt: skip
        forward = Forward(
            decoder, cache, max_length=length, state_rows=rows + 1, invariant=settings.invariant
        )
    runner = Runner(
        forward, sampler, rows, _adapters(forward, settings, clock),
        graph_tokens=limits.graph_tokens if settings.graphs else 0,
    )  # fmt: skip
    runner.holdings = held
    if draft is not None:
        runner.draft = _beside(runner, draft, rows)
    with clock("graphs"):
        if settings.graphs:
            runner.capture()
    return runner


def _beside(runner: Runner, draft: Decoder, rows: int) -> Runner:
    """Return what runs a draft beside its model, in blocks of the same numbers."""
    cache = runner.cache
    its = PagedCache(draft, cache.blocks, cache.block_tokens, fp8=cache.dtype == FP8)
    length = min(runner.forward.max_length, draft.model.max_positions)
    forward = Forward(draft, its, max_length=length, state_rows=rows + 1)
    return Runner(forward, runner.sampler, rows)


def _decoder(
    source: str | Path | Model,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None,
) -> tuple[Decoder, dict[str, Holding] | None]:
    """Return a rank's part of a model, and which part that is where it is not all of it."""
    drawn = isinstance(source, Model) or settings.random_weights
    if not drawn and mesh is None:
        assert not isinstance(source, Model)
        return load_served(source, device=device, dtype=dtype), None
    if not isinstance(source, Model) and is_gguf(Path(source)):
        what = "a GGUF file is read as a whole"
        raise InputError([Problem("tp", what, "use a Hugging Face folder, or one device")])
    model = source if isinstance(source, Model) else load_config(Path(source))
    held = None
    if mesh is None:
        decoder = build(model, device="meta", dtype=dtype, options=_SERVED)
        materialise(decoder, device, seed=0)
    else:
        part = spread(model, mesh, dtype=dtype, options=_SERVED)
        decoder, held = part.decoder, part.holdings
        if not drawn:
            assert not isinstance(source, Model)
            load(decoder, source, holdings=part.holdings)
    return decoder.eval().requires_grad_(False), held


def _sharing(source: str | Path | Model, lent: Mapping[str, Tensor], dtype: torch.dtype) -> Decoder:
    """Return a decoder whose parameters lie where those of another do."""
    model = source if isinstance(source, Model) else load_config(Path(source))
    decoder = build(model, device="meta", dtype=dtype, options=_SERVED)
    for path, module in decoder.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            shared = lent[f"{path}.{name}" if path else name]
            setattr(module, name, torch.nn.Parameter(shared.detach(), requires_grad=False))
    return decoder.eval()


def _adapters(forward: Forward, settings: EngineSettings, clock: Clock) -> Adapters | None:
    if (own := settings.own_adapter) is not None:
        with clock("adapters"):
            adapters = Adapters(forward, slots=1, rank=own.rank, dora=own.dora, modules=own.modules)
            adapters.usual = 0
        return adapters
    if not settings.adapters:
        return None
    with clock("adapters"):
        slots, rank = len(settings.adapters), settings.adapter_rank
        dora = any(uses_dora(folder) for folder in settings.adapters.values())
        adapters = Adapters(forward, slots=slots, rank=rank, dora=dora)
        for name, folder in settings.adapters.items():
            adapters.load(name, folder)
    return adapters


def _least(blocks: int, mesh: Mesh | None) -> int:
    """Return the least of what the ranks have room for: all have the same blocks."""
    if mesh is None:
        return blocks
    least = torch.tensor([blocks], device=mesh.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def _blocks(
    decoder: Decoder,
    draft: Decoder | None,
    settings: EngineSettings,
    device: torch.device,
    length: int,
) -> int:
    """Return how many blocks fit beside the weights and the largest step."""
    limits = settings.limits
    dtype = (
        torch.float8_e4m3fn if limits.kv_precision == "fp8" else next(decoder.parameters()).dtype
    )
    shapes = shapes_of(decoder) + ([] if draft is None else shapes_of(draft))
    each = block_bytes(shapes, limits.block_tokens, dtype)
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
    before = torch.cuda.memory_allocated(device)
    counts = [longest] * (limits.batch_tokens // longest)
    rows = [Row([0] * count, 0, range(per_row)) for count in counts]
    forward.run(step_of(rows, limits.block_tokens, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    # Captured steps keep room of their own.
    peak += int((peak - before) * limits.graph_tokens / limits.batch_tokens)
    # Logits of every row in fp32, once to change and once for what is drawn from; by rejection the
    # chances of both models, their difference and its noise as well, of every guess.
    copies, lines = (6, 1 + (settings.guesses or GUESSES)) if settings.draft else (2, 1)
    peak += copies * lines * 4 * limits.batch_requests * decoder.model.vocab
    del forward, cache
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _elsewhere(device: torch.device) -> int:
    """Return what others and the libraries have of the device's memory."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
