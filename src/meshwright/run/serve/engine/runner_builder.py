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
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.serve.engine.engine_config import DEFAULT_SPECULATIVE_TOKENS, EngineConfig
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.gguf_file import is_gguf
from meshwright.run.serve.model.kv_cache import (
    FP8,
    PagedKVCache,
    compute_block_bytes,
    get_kv_cache_specs,
)
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.peft_checkpoint import uses_dora
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HOST_CACHE_BYTES = 1 << 30
"""What the cache may take on a processor, where nobody says how many blocks it has."""
_SERVED = BuildOptions(include_mtp=False)


class StartupTimer:
    """Writes down what took how long."""

    def __init__(self) -> None:
        self.durations_s: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.durations_s.append((what, time.perf_counter() - start))


def resolve_device(name: str, rank: int = 0) -> torch.device:
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
        raise InputError([Problem("device", "no CUDA device is available", "use cpu")])
    number, count = (device.index or 0) + rank, torch.cuda.device_count()
    if number >= count:
        what = f"GPU {number} is asked for, torch sees {count}"
        raise InputError([Problem("device", what, "use fewer ranks, or another device")])
    return torch.device("cuda", number)


def validate_max_model_len(context: int, settings: EngineConfig) -> None:
    """Raise where prompts with their answers are to be longer than the model's context."""
    if settings.max_model_len is not None and settings.max_model_len > context:
        what = (
            f"{settings.max_model_len:,} is more than the {context:,} tokens of the model's context"
        )
        fix = f"use at most {context}, or leave it out"
        raise InputError([Problem("max_model_len", what, fix)])


def build_runner(
    source: str | Path | Model,
    settings: EngineConfig,
    ends: tuple[int, ...],
    clock: StartupTimer,
    mesh: Mesh | None = None,
    *,
    lent: Mapping[str, Tensor] | None = None,
) -> ModelRunner:
    """Return a runner that is ready; with a mesh, every rank of it does so at the same point.

    It uses weights that are `lent` where they lie, by the names of a decoder's parameters.
    """
    device = resolve_device(settings.device, 0 if mesh is None else mesh.rank)
    with clock("device"):
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
    named = "bf16" if device.type == "cuda" else "fp32"
    dtype = _DTYPES[named if settings.dtype == "auto" else settings.dtype]
    with clock("weights"):
        if lent is None:
            decoder, held = _decoder(source, settings, device, dtype, mesh)
        else:
            decoder, held = _sharing(source, lent, dtype), None
    if settings.quantization != "none":
        with clock("quantising"):
            quantize_model(decoder, settings.quantization)
    draft = None
    if settings.speculative_model:
        with clock("draft"):
            draft, _ = _decoder(settings.speculative_model, settings, device, dtype, None)
    limits, model = settings.scheduler_config, decoder.model
    validate_max_model_len(model.max_positions, settings)
    length = settings.max_model_len or model.max_positions
    rows = limits.max_num_seqs
    sampler = TokenSampler(rows + 1, model.vocab, device, eos=ends)
    with clock("memory"):
        blocks = limits.num_gpu_blocks or _min_blocks_over_ranks(
            _profile_kv_blocks(decoder, draft, settings, device, length), mesh
        )
    if blocks < 1:
        what = "the weights leave no memory for keys and values"
        raise InputError(
            [Problem("gpu_memory_utilization", what, "use a larger share or smaller weights")]
        )
    with clock("cache"):
        cache = PagedKVCache(
            decoder, blocks, limits.block_size, fp8=limits.kv_cache_dtype == "fp8",
            num_host_blocks=limits.num_cpu_blocks,
        )  # fmt: skip
        forward = ServedModel(
            decoder,
            cache,
            max_model_len=length,
            state_rows=rows + 1,
            batch_invariant=settings.batch_invariant,
        )
    runner = ModelRunner(
        forward, sampler, rows, _adapters(forward, settings, clock),
        graph_tokens=limits.max_cudagraph_capture_size if settings.cuda_graphs else 0,
    )  # fmt: skip
    runner.weight_shards = held
    if draft is not None:
        runner.draft_runner = _draft_runner(runner, draft, rows)
    with clock("graphs"):
        if settings.cuda_graphs:
            runner.capture()
    return runner


def _draft_runner(runner: ModelRunner, draft: Decoder, rows: int) -> ModelRunner:
    """Return what runs a draft beside its model, in blocks of the same numbers."""
    cache = runner.kv_cache
    its = PagedKVCache(draft, cache.num_blocks, cache.block_size, fp8=cache.dtype == FP8)
    length = min(runner.model.max_model_len, draft.model.max_positions)
    forward = ServedModel(draft, its, max_model_len=length, state_rows=rows + 1)
    return ModelRunner(forward, runner.sampler, rows)


def _decoder(
    source: str | Path | Model,
    settings: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None,
) -> tuple[Decoder, dict[str, ShardSpec] | None]:
    """Return a rank's part of a model, and which part that is where it is not all of it."""
    drawn = isinstance(source, Model) or settings.random_weights
    if not drawn and mesh is None:
        assert not isinstance(source, Model)
        return load_served_model(source, device=device, dtype=dtype), None
    if not isinstance(source, Model) and is_gguf(Path(source)):
        what = "a GGUF file is read as a whole"
        raise InputError(
            [Problem("tensor_parallel_size", what, "use a Hugging Face folder, or one device")]
        )
    model = source if isinstance(source, Model) else load_config(Path(source))
    held = None
    if mesh is None:
        decoder = build_decoder(model, device="meta", dtype=dtype, options=_SERVED)
        materialize(decoder, device, seed=0)
    else:
        part = shard_model(model, mesh, dtype=dtype, options=_SERVED)
        decoder, held = part.decoder, part.shard_specs
        if not drawn:
            assert not isinstance(source, Model)
            load_hf_checkpoint(decoder, source, shard_specs=part.shard_specs)
    return decoder.eval().requires_grad_(False), held


def _sharing(source: str | Path | Model, lent: Mapping[str, Tensor], dtype: torch.dtype) -> Decoder:
    """Return a decoder whose parameters lie where those of another do."""
    model = source if isinstance(source, Model) else load_config(Path(source))
    decoder = build_decoder(model, device="meta", dtype=dtype, options=_SERVED)
    for path, module in decoder.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            shared = lent[f"{path}.{name}" if path else name]
            setattr(module, name, torch.nn.Parameter(shared.detach(), requires_grad=False))
    return decoder.eval()


def _adapters(
    forward: ServedModel, settings: EngineConfig, clock: StartupTimer
) -> LoRAManager | None:
    if (own := settings.trained_lora_slot) is not None:
        with clock("adapters"):
            adapters = LoRAManager(
                forward,
                slots=1,
                max_lora_rank=own.max_rank,
                dora=own.dora,
                modules=own.target_modules,
            )
            adapters.default_slot = 0
        return adapters
    if not settings.lora_modules:
        return None
    with clock("adapters"):
        slots, rank = len(settings.lora_modules), settings.max_lora_rank
        dora = any(uses_dora(folder) for folder in settings.lora_modules.values())
        adapters = LoRAManager(forward, slots=slots, max_lora_rank=rank, dora=dora)
        for name, folder in settings.lora_modules.items():
            adapters.load(name, folder)
    return adapters


def _min_blocks_over_ranks(blocks: int, mesh: Mesh | None) -> int:
    """Return the least of what the ranks have room for: all have the same blocks."""
    if mesh is None:
        return blocks
    least = torch.tensor([blocks], device=mesh.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def _profile_kv_blocks(
    decoder: Decoder,
    draft: Decoder | None,
    settings: EngineConfig,
    device: torch.device,
    length: int,
) -> int:
    """Return how many blocks fit beside the weights and the largest step."""
    limits = settings.scheduler_config
    dtype = (
        torch.float8_e4m3fn if limits.kv_cache_dtype == "fp8" else next(decoder.parameters()).dtype
    )
    shapes = get_kv_cache_specs(decoder) + ([] if draft is None else get_kv_cache_specs(draft))
    each = compute_block_bytes(shapes, limits.block_size, dtype)
    enough = limits.max_num_seqs * -(-length // limits.block_size)
    if not each:
        return enough
    if device.type != "cuda":
        return min(enough, max(_HOST_CACHE_BYTES // each, -(-length // limits.block_size)))
    peak = _profile_peak_memory(decoder, settings, device, length)
    _, total = torch.cuda.mem_get_info(device)
    room = settings.gpu_memory_utilization * total - peak - _memory_used_by_others(device)
    return min(enough, int(room // each))


def _profile_peak_memory(
    decoder: Decoder, settings: EngineConfig, device: torch.device, length: int
) -> int:
    """Return the most memory that a step takes, weights included, by computing one."""
    limits = settings.scheduler_config
    longest = min(length, limits.max_num_batched_tokens)
    per_row = -(-longest // limits.block_size)
    cache = PagedKVCache(decoder, per_row, limits.block_size)
    forward = ServedModel(decoder, cache, max_model_len=length, state_rows=limits.max_num_seqs + 1)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    counts = [longest] * (limits.max_num_batched_tokens // longest)
    rows = [BatchRow([0] * count, 0, range(per_row)) for count in counts]
    forward.forward(build_forward_batch(rows, limits.block_size, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    # Captured steps keep room of their own.
    peak += int((peak - before) * limits.max_cudagraph_capture_size / limits.max_num_batched_tokens)
    # Logits of every row in fp32, once to change and once for what is drawn from; by rejection the
    # chances of both models, their difference and its noise as well, of every guess.
    copies, lines = (
        (6, 1 + (settings.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS))
        if settings.speculative_model
        else (2, 1)
    )
    peak += copies * lines * 4 * limits.max_num_seqs * decoder.model.vocab
    del forward, cache
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _memory_used_by_others(device: torch.device) -> int:
    """Return what others and the libraries have of the device's memory."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
