"""What is trained on chats is what the engine then answers, to the token that ends it."""

from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from torch.nn import functional

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.build import build
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.data import ChatBatches, prepare
from meshwright.run.posttrain.data.records import Record
from meshwright.run.posttrain.evaluate import evaluate, read_questions
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.llm import LLM
from meshwright.spec.model import Attention, Block, Mlp, Model, Rotary
from meshwright.spec.serving import Limits
from tests.run.posttrain.data.small_words import CHATML, chat, words_of

LETTERS = "bcdfghjk"


@pytest.mark.slow
def test_held_out_chats_are_answered_after_training_on_the_others(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    # The answer is what the user said: "b c d" is answered by "b c d".
    records = [
        Record(f"here:{number}", chat(" ".join(said), " ".join(said)))
        for number, said in enumerate(product(LETTERS, repeat=3))
    ]
    words = words_of()
    chats = prepare(records, words, length=128, validation=0.1)
    batches = ChatBatches(chats, global_batch=8, vocabulary_size=words.size)
    attention = Attention(heads=4, kv_heads=4, head_dim=16, rotary=Rotary())
    block = Block(name="plain", mixer=attention, mlp=Mlp(width=128))
    model = Model(
        name="m", hidden=64, vocab=words.size, blocks=(block,), pattern="2*plain", max_positions=128
    )
    decoder = build(model, dtype=torch.float32)
    materialise(decoder, "cpu", seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for step in range(150):
        batch = batches.at(step)
        logits = decoder(batch.tokens_BT, positions=batch.positions_BT, documents=batch.documents)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save(decoder, tmp_path)
    words.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    limits = Limits(batch_tokens=256, batch_requests=16, block_tokens=16, kv_blocks=256)
    llm = LLM(tmp_path, EngineSettings(limits=limits, device="cpu", max_length=128))
    held = read_questions(records, validation=0.1)
    report = evaluate(llm, held, sampling=Sampling(temperature=0.0, max_tokens=8))
    assert len(held) == 51
    assert report["exact"].share > 0.9
    assert report.cut == 0
