"""What the host takes for one layer of the trainer: layers so small that nothing else counts.

Python, autograd and the launches themselves are all in it. Embedding, head and loss are taken off
by the difference of two depths.
"""

import time
from collections.abc import Callable

from msgspec.structs import replace

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.spec.model import AttentionSpec, BlockSpec, Model, MoESpec, build_decoder_model

DEPTHS = (2, 6)
KINDS = ("dense", "experts")
PASSES = ("forward", "backward")
_TOKENS = 64


def build_small_model(kind: str, layers: int) -> Model:
    """Return a model of so many small layers of a kind."""
    model = build_decoder_model(
        "small", layers=layers, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512,
        max_positions=_TOKENS,
    )  # fmt: skip
    if kind == "dense":
        return model
    mixer = AttentionSpec(heads=4, kv_heads=2, head_dim=64)
    block = BlockSpec(name="experts", mixer=mixer, mlp=MoESpec(count=8, top_k=2, width=128))
    return replace(model, blocks=(block,), pattern=f"{layers}*experts")


def make_layer_sampler(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
    """Return what times a layer's forward or backward pass on the host."""
    import torch

    from meshwright.run.kernels.gemm.gemm import select_gemm_backend
    from meshwright.run.nn.decoder import Decoder
    from meshwright.run.train.decoder_factory import make_decoder
    from meshwright.spec.layout import Layout

    device, layout = place.device, Layout()
    # Nothing is tuned for products as small as these; the calls are those of a step.
    products = select_gemm_backend(device)
    every = [
        make_decoder(
            build_small_model(case.text("kind"), depth), layout, device=device, gemm=products
        )
        for depth in DEPTHS
    ]
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)

    def passes(module: Decoder) -> dict[str, float]:
        if place.on_gpu:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        loss = module.loss(tokens, tokens).total
        made = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        done = time.perf_counter()
        module.zero_grad(set_to_none=True)
        return {"forward": made - begun, "backward": done - made}

    for module in every:
        passes(module)

    def sample() -> float:
        few, many = (passes(module)[case.name.removeprefix("layer_")] for module in every)
        return max(0.0, many - few) / (DEPTHS[1] - DEPTHS[0])

    return sample
