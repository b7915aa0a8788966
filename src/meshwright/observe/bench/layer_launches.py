"""What the host takes for one layer of the trainer: layers so small that nothing else counts.

Python, autograd and the launches themselves are all in it. Embedding, head and loss are taken off
by the difference of two depths.
"""

import time
from collections.abc import Callable

from msgspec.structs import replace

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.family import Place
from meshwright.spec.model import Attention, Block, Experts, Model, decoder

DEPTHS = (2, 6)
KINDS = ("dense", "experts")
PASSES = ("forward", "backward")
_TOKENS = 64


def small_model(kind: str, layers: int) -> Model:
    """Return a model of so many small layers of a kind."""
    model = decoder(
        "small", layers=layers, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512,
        max_positions=_TOKENS,
    )  # fmt: skip
    if kind == "dense":
        return model
    mixer = Attention(heads=4, kv_heads=2, head_dim=64)
    block = Block(name="experts", mixer=mixer, mlp=Experts(count=8, top_k=2, width=128))
    return replace(model, blocks=(block,), pattern=f"{layers}*experts")


def layer_sample(case: Case, place: Place) -> Callable[[], float]:
    """Return what times a layer's forward or backward pass on the host."""
    import torch

    from meshwright.run.kernels.products import fastest_products
    from meshwright.run.nn.decoder import Decoder
    from meshwright.run.train.step import make_decoder
    from meshwright.spec.layout import Layout

    device, layout = place.device, Layout()
    # Nothing is tuned for products as small as these; the calls are those of a step.
    products = fastest_products(device)
    every = [
        make_decoder(
            small_model(case.word("kind"), depth), layout, device=device, products=products
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
