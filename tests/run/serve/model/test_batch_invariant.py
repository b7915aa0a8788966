"""With steady products an answer does not depend on what is computed beside it."""

import pytest

pytest.importorskip("triton", reason="the products are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.serve.model.batch_invariant import batch_invariant_linear
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from tests.run.kernels.exactness import drawn, error
from tests.run.serve.model.greedy import random_prompts
from tests.run.serve.model.small import DEVICE, hybrid, latent, small
from tests.run.serve.model.test_quantization import wide


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_exact_and_the_same_alone(bias: bool) -> None:
    x, weight = drawn(70, 48), drawn(40, 48, seed=1)
    shift = drawn(40, seed=2) if bias else None
    found = batch_invariant_linear(x, weight, shift, backend="triton")
    exact = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
    assert error(found, exact) < 2e-6
    for rows in (1, 7, 64):
        alone = batch_invariant_linear(x[:rows], weight, shift, backend="triton")
        assert torch.equal(alone, found[:rows])


def test_steady_models_answer_as_others() -> None:
    prompt = random_prompts(61)[0]
    step = build_forward_batch([BatchRow(prompt, 0, range(4))], 4, DEVICE)
    found = []
    for invariant in (False, True):
        decoder = small()
        forward = ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=invariant)
        found.append(forward.forward(step))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: processors' libraries promise no bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_in_any_batch_and_in_any_pieces(dtype: torch.dtype) -> None:
    decoder = small(dtype)
    forward = ServedModel(decoder, PagedKVCache(decoder, 512, 4), batch_invariant=True)
    prompts = random_prompts(61, (19, *range(3, 50)))
    tables = [range(13 * at, 13 * at + 13) for at in range(len(prompts) - 9)]
    prompts = prompts[: len(tables)]
    alone = forward.forward(build_forward_batch([BatchRow(prompts[0], 0, tables[0])], 4, DEVICE))
    rows = [BatchRow(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    assert torch.equal(forward.forward(build_forward_batch(rows, 4, DEVICE))[:1], alone)
    for cut in (1, 5, 18):
        forward.forward(build_forward_batch([BatchRow(prompts[0][:cut], 0, tables[0])], 4, DEVICE))
        last = build_forward_batch([BatchRow(prompts[0][cut:], cut, tables[0])], 4, DEVICE)
        assert torch.equal(forward.forward(last), alone)


def test_what_cannot_be_steady_is_refused() -> None:
    for make in (hybrid, latent):
        decoder = make()
        with pytest.raises(InputError, match="recurrences and latent attention depend"):
            ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=True)
    decoder = small()
    with pytest.raises(InputError, match="without one of the two"):
        LoRAManager(ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=True))
    decoder = wide()
    ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=True)
    ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=True)
    decoder = wide()
    quantize_model(decoder, "int4")
    with pytest.raises(InputError, match="quantised weights depend"):
        ServedModel(decoder, PagedKVCache(decoder, 8, 4), batch_invariant=True)
