"""What is trained on chats is what the engine then answers, to the token that ends it."""

from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from torch.nn import functional

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.data import ChatBatches, prepare_dataset
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.posttrain.evaluation import evaluate, read_questions
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.posttrain.data.small_words import CHATML, chat, words_of

LETTERS = "bcdfghjk"


@pytest.mark.slow
def test_held_out_chats_are_answered_after_training_on_the_others(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    # The answer is what the user said: "b c d" is answered by "b c d".
    records = [
        DataRecord(f"here:{number}", chat(" ".join(said), " ".join(said)))
        for number, said in enumerate(product(LETTERS, repeat=3))
    ]
    words = words_of()
    chats = prepare_dataset(records, words, length=128, validation=0.1)
    batches = ChatBatches(chats, global_batch=8, vocabulary_size=words.vocab_size)
    attention = AttentionSpec(heads=4, kv_heads=4, head_dim=16, rotary=Rotary())
    block = BlockSpec(name="plain", mixer=attention, mlp=MLPSpec(width=128))
    model = Model(
        name="m",
        hidden=64,
        vocab=words.vocab_size,
        blocks=(block,),
        pattern="2*plain",
        max_positions=128,
    )
    decoder = build_decoder(model, dtype=torch.float32)
    materialize(decoder, "cpu", seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for step in range(150):
        batch = batches.get_batch(step)
        logits = decoder(batch.tokens_BT, positions=batch.positions_BT, documents=batch.documents)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE_INDEX
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_hf_checkpoint(decoder, tmp_path)
    words.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    limits = SchedulerConfig(
        max_num_batched_tokens=256, max_num_seqs=16, block_size=16, num_gpu_blocks=256
    )
    llm = LLM(tmp_path, EngineConfig(scheduler_config=limits, device="cpu", max_model_len=128))
    held = read_questions(records, validation=0.1)
    report = evaluate(llm, held, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    assert len(held) == 51
    assert report["exact"].share > 0.9
    assert report.num_truncated == 0
