"""One trainer, one shape, one precision: builds it, times full steps, prints one JSON line.

A contender runs in a process of its own (its memory and compiled code end with it):

    python -m benchmarks.train_contenders ours --shape 1b --precision bf16 --batch 8

A step is forward, backward, clipping to 1 and AdamW. FLOPs are counted alike for all: 6 per
weight that multiplies and token, plus causal attention once (`megatron` in
`meshwright.spec.model.CONVENTIONS`). torchtitan and torchao are optional; the folder of their
unpacked wheels is given by MESHWRIGHT_PEERS where they are not installed.
"""

import argparse
import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, Rotary, build_decoder_model, flops_per_token

PEAK_FLOPS = 989.4e12
"""Dense bfloat16 of H100 and H200, per second (NVIDIA data sheet)."""

SHAPES: dict[str, Model] = {
    "1b": build_decoder_model(
        "llama3.2-1b-untied", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192,
        vocab=128256, rotary=Rotary(theta=5e5), max_positions=8192,
    ),
    "8b": build_decoder_model(
        "llama3.1-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
        vocab=128256, rotary=Rotary(theta=5e5), max_positions=8192,
    ),
    "moe": msgspec.structs.replace(
        catalog.get_model("qwen3-30b-a3b"), name="qwen3-30b-a3b cut to 6 layers", pattern="6*moe"
    ),
    "tiny": build_decoder_model(
        "tiny", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=512, max_positions=128,
    ),
}  # fmt: skip

_PURE = {"master_precision": "none", "moment_precision": "bf16", "gradient_precision": "bf16"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", **_PURE},
    "bf16-masters": {"precision": "bf16"},
    "fp8-tensorwise": {"precision": "fp8-tensorwise", **_PURE},
    "fp8-rowwise": {"precision": "fp8-rowwise", **_PURE},
    "fp8-blockwise": {"precision": "fp8-blockwise", **_PURE},
    "fp8-tensorwise-masters": {"precision": "fp8-tensorwise"},
}
"""What is asked of a contender, in the words of a layout: weights and AdamW's moments in bf16, or
fp32 masters and moments; linears in bf16 or fp8."""


class Asked(NamedTuple):
    """What a contender shall do."""

    model: Model
    precision: str
    batch: int
    length: int
    recompute: tuple[str, ...] | None
    device: torch.device


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    tokens_per_s: float
    teraflops: float
    mfu: float
    step_ms: float
    memory_gib: float
    first_loss: float
    last_loss: float
    clock_mhz: float | None = None


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One full training step on tokens and labels, returning the loss without waiting for it."""


def on_mesh(asked: Asked) -> Step:
    """Return the same step by the code for many devices, on a mesh of one."""
    return ours(asked, mesh=True)


def ours(asked: Asked, *, mesh: bool = False) -> Step:
    """Return a step of Meshwright's own trainer."""
    from meshwright.run.kernels.gemm.gemm import select_gemm_backend
    from meshwright.run.parallel.mesh import Mesh
    from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
    from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
    from meshwright.run.train.decoder_factory import make_decoder
    from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
    from meshwright.run.train.step_backend import MeshStepBackend, make_sharded_model
    from meshwright.run.train.train_step import TrainStep

    words = dict(PRECISIONS[asked.precision])
    if asked.recompute is not None:
        full = asked.recompute == ("full",)
        words["recompute"] = "full" if full else "selective"
        words["recompute_ops"] = () if full else asked.recompute
    layout = Layout(microbatch=asked.batch, **words)
    device = asked.device
    products = select_gemm_backend(device)
    settings = OptimizerConfig(lr=1e-4, betas=(0.9, 0.95), schedule="constant", warmup_steps=0)
    train: TrainStep | MeshStepBackend
    if mesh:
        spread = make_sharded_model(asked.model, Mesh(layout, device=device), gemm=products)
        sync = make_gradient_sync(spread)
        optimizer = make_optimizer(sync.named_parameters(), layout, settings, total_steps=1000)
        train = MeshStepBackend(spread, sync, optimizer, microbatch=asked.batch)
    else:
        module = make_decoder(asked.model, layout, device=device, gemm=products)
        optimizer = make_optimizer(module.named_parameters(), layout, settings, total_steps=1000)
        train = TrainStep(module, optimizer, microbatch=asked.batch)
    whole = SequenceInfo(
        documents=1,
        max_document_length=asked.length,
        num_targets=asked.length,
        num_tokens=asked.length,
    )
    rows = (whole,) * asked.batch
    done = 0

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal done
        figures = train(TrainBatch(done, tokens, labels, None, None, rows), done)
        done += 1
        return figures.losses.mean_loss

    return step


def titan(asked: Asked) -> Step:
    """Return a step of torchtitan's Llama: each block compiled, cuDNN attention first."""
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    first = asked.model.blocks[0]
    mixer, mlp = first.mixer, first.mlp
    transformer, arguments = _titan_model()
    module = transformer(
        arguments(
            dim=asked.model.hidden, n_layers=asked.model.layers, n_heads=mixer.heads,  # type: ignore[union-attr]
            n_kv_heads=mixer.kv_heads, vocab_size=asked.model.vocab, multiple_of=256,  # type: ignore[union-attr]
            ffn_dim_multiplier=mlp.width / (asked.model.hidden * 8 / 3), rope_theta=5e5,  # type: ignore[union-attr]
            max_seq_len=asked.length, attn_type="sdpa",
        )
    ).to(asked.device)  # fmt: skip
    with torch.no_grad():
        module.init_weights(buffer_device=asked.device)
    if asked.precision.startswith("fp8"):
        _torchao_fp8(module, PRECISIONS[asked.precision]["precision"].removeprefix("fp8-"))
    if PRECISIONS[asked.precision].get("master_precision") == "none":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    for name, block in module.layers.named_children():
        module.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss_of = torch.compile(
        lambda logits, labels: nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten()
        )
    )
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
        fused=asked.device.type == "cuda",
    )  # fmt: skip
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backends, set_priority=True):
            with torch.autocast(asked.device.type, torch.bfloat16):
                loss: torch.Tensor = loss_of(module(tokens), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _peer_folders() -> None:
    """Let Python find the unpacked wheels of peers, each in a folder of its own."""
    folder = os.environ.get("MESHWRIGHT_PEERS")
    if folder:
        sys.path += [str(path) for path in sorted(Path(folder).iterdir()) if path.is_dir()]


def _titan_model() -> tuple[Any, Any]:
    """Load torchtitan's Llama without its packages' own imports, which want other torch versions.

    What those packages would give the model file is its base class and a type of tokenizer.
    """
    _peer_folders()
    root = next(
        Path(each) / "torchtitan"
        for each in sys.path
        if (Path(each) / "torchtitan" / "models").is_dir()
    )
    for part in ("", "models", "models.llama3", "models.llama3.model", "components", "protocols"):
        name = f"torchtitan.{part}".rstrip(".")
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*part.split(".")))]
        sys.modules[name] = package

    class ModelProtocol(torch.nn.Module):
        def __init__(self, *_: object) -> None:
            super().__init__()

    tokenizer = types.ModuleType("torchtitan.components.tokenizer")
    tokenizer.BaseTokenizer = object  # type: ignore[attr-defined]
    protocol = types.ModuleType("torchtitan.protocols.train_spec")
    protocol.ModelProtocol = ModelProtocol  # type: ignore[attr-defined]
    sys.modules[tokenizer.__name__], sys.modules[protocol.__name__] = tokenizer, protocol
    models = importlib.import_module("torchtitan.models.llama3.model.model")
    arguments = importlib.import_module("torchtitan.models.llama3.model.args")
    return models.Transformer, arguments.TransformerModelArgs


def _torchao_fp8(module: torch.nn.Module, recipe: str) -> None:
    float8 = importlib.import_module("torchao.float8")
    float8.convert_to_float8_training(
        module,
        config=float8.Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: name != "output",
    )


CONTENDERS: dict[str, Callable[[Asked], Step]] = {
    "ours": ours,
    "mesh": on_mesh,
    "torchtitan": titan,
}


def timed(contender: str, asked: Asked, *, warm_up: int, steps: int) -> Timed:
    """Time full steps of one contender on one batch of random tokens."""
    torch.manual_seed(0)
    if asked.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    step = CONTENDERS[contender](asked)
    rows = torch.randint(0, asked.model.vocab, (asked.batch, asked.length + 1), device=asked.device)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    losses = [step(tokens, labels) for _ in range(warm_up)]
    clock = _GpuClock() if asked.device.type == "cuda" else _HostClock()
    for _ in range(steps):
        losses.append(step(tokens, labels))
        clock.mark()
    taken = clock.intervals_s()
    step_s, count = median(taken), asked.batch * asked.length
    flops = count * flops_per_token(asked.model, asked.length, "megatron")
    on_gpu = asked.device.type == "cuda"
    return Timed(
        tokens_per_s=count / step_s,
        teraflops=flops / step_s / 1e12,
        mfu=flops / step_s / PEAK_FLOPS,
        step_ms=step_s * 1e3,
        memory_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        first_loss=float(losses[0]),
        last_loss=float(losses[-1]),
        clock_mhz=float(torch.cuda.clock_rate()) if on_gpu else None,
    )


class _HostClock:
    """Times what the host does itself."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def mark(self) -> None:
        """Note the time after a step."""
        self.marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        """Return the time of each step."""
        return [after - before for before, after in pairwise(self.marks)]


class _GpuClock:
    """Times steps on the device, which the host need not wait for: no trainer waits either."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Have the device note the time after what was queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.marks.append(event)

    def intervals_s(self) -> list[float]:
        """Return the time of each step."""
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self.marks)]


def main() -> None:
    """Run one contender as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=sorted(CONTENDERS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="bf16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--recompute", default="")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    asked = Asked(
        model=SHAPES[given.shape],
        precision=given.precision,
        batch=given.batch,
        length=given.length,
        recompute=tuple(given.recompute.split(",")) if given.recompute else None,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    result = timed(given.contender, asked, warm_up=given.warm_up, steps=given.steps)
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
