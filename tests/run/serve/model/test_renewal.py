"""Weights renewed in place give the answers of the new model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.errors import InputError
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.load import load_served
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.renewal import Renewal
from meshwright.run.serve.model.step import Row, step_of
from tests.run.nn.huggingface.drawn import draw
from tests.run.nn.huggingface.reference import logits_of, reference

PROMPT = [3, 14, 15, 92, 65]


def served(family: str, folder: Path) -> tuple[Forward, Any]:
    theirs = reference(family, draw(family, 0))
    theirs.save_pretrained(folder)
    decoder = load_served(folder, dtype=torch.float32)
    return Forward(decoder, PagedCache(decoder, 8, 4), max_length=32), theirs


def check(forward: Forward, theirs: Any) -> None:
    found = forward.run(step_of([Row(PROMPT, 0, range(2))], 4))
    wanted = logits_of(theirs, torch.tensor([PROMPT]))[0, -1:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_moe"])
def test_renewed_weights_are_those_that_answer(family: str, tmp_path: Path) -> None:
    forward, theirs = served(family, tmp_path)
    renewal = Renewal(forward)
    places = [weight.data_ptr() for weight in forward.decoder.parameters()]
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.mul_(1.1).add_(0.01)
    renewal.begin()
    # As a checkpoint names them, which differs from a module's own names where experts are fused.
    theirs.save_pretrained(tmp_path / "new")
    state = list(load_file(tmp_path / "new" / "model.safetensors").items())
    renewal.write(state[::2])
    assert renewal.left
    renewal.write(state[1::2])
    assert not renewal.left
    assert places == [weight.data_ptr() for weight in forward.decoder.parameters()]
    check(forward, theirs)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    forward, _ = served("llama", tmp_path)
    renewal = Renewal(forward)
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        renewal.write([("model.norms.weight", torch.zeros(1))])
    with pytest.raises(InputError, match="this very model"):
        renewal.write([("model.norm.weight", torch.zeros(1))])
    assert quantise(forward.decoder, "fp8").layers
    with pytest.raises(InputError, match="unquantised"):
        Renewal(forward)
