"""The laws of the config bridge: what is read can be written, and the other way round.

`configs.json` holds the architecture keys of published `config.json` files, by catalog name.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    Model,
    MtpSpec,
    NormSpec,
    Rotary,
)
from meshwright.spec.model.huggingface import (
    list_model_types,
    load_config,
    read_config,
    write_config,
)

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "configs.json").read_text(encoding="utf-8")
)

# Keys that say how to train, run or store a model, not what it is.
NOT_ARCHITECTURE = {
    "attention_softmax_in_fp32", "attn_implementation", "aux_loss_alpha", "cache_implementation",
    "chunk_size", "emb_pdrop", "embedding_dropout", "ep_size", "ignore_index",
    "initial_context_length", "input_jitter_noise", "is_llama_config", "mamba_ssm_cache_dtype",
    "model_max_length", "moe_shared_expert_overlap", "num_logits_to_keep", "output_router_logits",
    "pretraining_tp", "projection_dim", "rescale_prenorm_residual", "residual_dropout",
    "residual_in_fp32", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef",
    "scale_attention_softmax_in_fp32", "seq_aux", "time_step_floor", "time_step_max",
    "time_step_min", "transformers.js_config", "use_mamba_kernels", "tokens_per_second",
    "projector_dropout", "attn_impl", "init_device", "verbose",
}  # fmt: skip
# Keys that no modelling code reads any more, or that repeat others.
DEAD = {
    "attention_sink_size", "embedding_fraction", "expand", "learned_pos_emb", "mlp_type", "n_ctx",
    "norm_type", "rope_interleaved", "sliding_window_size", "time_step_rank", "use_mrope",
    "attn_uses_sequence_id", "prefix_lm", "spatial_patch_size", "attn_pdrop", "experts_per_token",
}  # fmt: skip
# Another spelling of the same key, by family where it matters.
SPELLINGS = {
    "attention_head_dim": "head_dim",
    "in_chans": "in_channels",
    "norm_eps": "layer_norm_epsilon",
    "type": "rope_type",
}
SAME_WORD = {
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "mrope": "default",
    "su": "longrope",
}


def _is_token(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index"))


def _matters(key: str, table: dict[str, Any], family: str) -> bool:
    if key in NOT_ARCHITECTURE | DEAD or _is_token(key):
        return False
    if key in {"sliding_window", "max_window_layers"} and not table.get("use_sliding_window", True):
        return False
    if key == "hidden_act" and family in {"gemma", "gemma2"}:
        return False  # `hidden_activation` overrides it
    if key in {"rms_norm_eps", "norm_eps", "rope_theta", "partial_rotary_factor"}:
        return family != "nemotron_h"  # it reads layer_norm_epsilon, and has no positions
    if key == "intermediate_size" and family == "nemotron_h":
        return "-" in table["hybrid_override_pattern"]
    if key == "intermediate_size" and family in {"qwen2_moe", "qwen3_moe", "qwen3_next"}:
        return False  # the width of dense layers, of which there are none
    if key == "vocab_size" and family.startswith("llava"):
        return False  # a copy of the decoder's, or of CLIP's text half
    if key in {"activation_function", "layer_norm_epsilon", "scale_attn_weights"}:
        return family != "starcoder2"  # kept from StarCoder 1
    if key == "intermediate_size_mlp":
        return bool(table["interleave_moe_layer_step"] > 1)
    if key == "original_max_position_embeddings":
        return bool(table.get("rope_scaling")) or "factor" in table
    return key not in {"full_attention_interval", "sliding_window_pattern"}  # told by layer_types


def _disagreements(
    given: dict[str, Any], written: dict[str, Any], family: str, where: str = ""
) -> list[str]:
    found = []
    for key, value in given.items():
        if not _matters(key, given, family):
            continue
        ours = written.get(SPELLINGS.get(key, key)) if key not in written else written[key]
        place = f"{where}{key}"
        if isinstance(value, dict) and isinstance(ours, dict):
            inner = family if key != "vision_config" else f"{family} vision"
            found += _disagreements(value, ours, inner, f"{place}.")
        elif isinstance(value, str) and isinstance(ours, str):
            if SAME_WORD.get(value, value) != SAME_WORD.get(ours, ours):
                found.append(f"{place}: {value!r} became {ours!r}")
        elif value != ours:
            found.append(f"{place}: {value!r} became {ours!r}")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_written_config_agrees_with_the_published_one(name: str) -> None:
    config = CONFIGS[name]
    written = write_config(read_config(config, name))
    assert _disagreements(config, written, config["model_type"]) == []


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"internlm-7b"}))
def test_published_config_reads_as_the_catalog_has_it(name: str) -> None:
    assert read_config(CONFIGS[name], name) == get_model(name)


@pytest.mark.parametrize("name", list_models())
def test_catalog_model_comes_back_from_its_config(name: str) -> None:
    assert read_config(write_config(get_model(name)), name) == get_model(name)


def test_written_config_survives_json() -> None:
    for name in ("gemma3-27b", "deepseek-v3", "nemotron-h-56b"):
        text = json.dumps(write_config(get_model(name)), allow_nan=False)
        assert read_config(json.loads(text), name) == get_model(name)


WITHOUT_DEFAULTS = {
    "deepseek_v2": "num_experts_per_tok",
    "gemma3": "vision_config",
    "glm4_moe": "num_attention_heads",
    "llama4": "vision_config",
    "llava": "vision_config",
    "nemotron_h": "hybrid_override_pattern",
    "qwen2_5_vl": "vision_config",
    "qwen2_vl": "vision_config",
}


@pytest.mark.parametrize("family", sorted(set(list_model_types()) - set(WITHOUT_DEFAULTS)))
def test_keys_left_out_take_the_defaults_of_the_class(family: str) -> None:
    default = read_config({"model_type": family, "vocab_size": 1000})
    assert default.vocab == 1000
    assert read_config(write_config(default)) == default


@pytest.mark.parametrize("family", WITHOUT_DEFAULTS)
def test_key_without_a_default_is_asked_for(family: str) -> None:
    with pytest.raises(InputError) as caught:
        read_config({"model_type": family, "vocab_size": 1000, "text_config": {"vocab_size": 1}})
    assert [problem.where for problem in caught.value.problems] == [WITHOUT_DEFAULTS[family]]


@pytest.mark.parametrize("family", list_model_types())
def test_config_that_says_no_width_is_taken_for_damaged(family: str) -> None:
    with pytest.raises(InputError, match="check that the file is whole"):
        read_config({"model_type": family, "num_hidden_layers": 32, "n_layer": 2, "n_layers": 2})


def test_rope_parameters_of_version_5_mean_the_same() -> None:
    old = {
        "model_type": "llama",
        "hidden_size": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    new = {
        "model_type": "llama",
        "hidden_size": 4096,
        "dtype": "bfloat16",
        "rope_parameters": {**old["rope_scaling"], "rope_theta": 500000.0},  # type: ignore[dict-item]
    }
    assert read_config(new) == read_config(old)


def test_rope_parameters_by_kind_of_layer_mean_the_same() -> None:
    old = {
        "model_type": "gemma3_text",
        "hidden_size": 2304,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    new = {
        "model_type": "gemma3_text",
        "hidden_size": 2304,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4
        + ["sliding_attention"] * 2,
    }
    assert read_config(new) == read_config(old)


def test_nested_text_config_of_qwen2_vl_means_the_same() -> None:
    flat = CONFIGS["qwen2-vl-7b"]
    outside = {"model_type", "vision_config"}
    nested = {key: flat[key] for key in outside}
    nested["text_config"] = {key: value for key, value in flat.items() if key not in outside}
    assert read_config(nested, "x") == read_config(flat, "x")


def test_unknown_model_type_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(InputError) as caught:
        read_config({"model_type": "lama"})
    (problem,) = caught.value.problems
    assert problem.where == "model_type"
    assert "did you mean llama" in problem.fix
    assert all(family in problem.fix for family in list_model_types())


def test_every_fault_is_listed_with_its_key_and_value() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": "4096",
        "num_hidden_layers": -3,
        "num_attention_heads": 0,
        "vocab_size": None,
        "rms_norm_eps": float("nan"),
        "hidden_act": "sillu",
        "tie_word_embeddings": "no",
        "rope_scaling": {"rope_type": "yarn", "factr": 4},
    }
    with pytest.raises(InputError) as caught:
        read_config(config)
    faults = {problem.where: str(problem) for problem in caught.value.problems}
    assert set(faults) == {
        "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps",
        "hidden_act", "tie_word_embeddings", "rope_scaling.factr", "rope_scaling.factor",
    }  # fmt: skip
    assert "'4096'" in faults["hidden_size"]
    assert "did you mean silu" in faults["hidden_act"]
    assert "did you mean factor" in faults["rope_scaling.factr"]


def test_fault_in_a_nested_table_has_its_path() -> None:
    config = {**CONFIGS["gemma3-27b"], "text_config": {"num_attention_heads": "x"}}
    with pytest.raises(InputError, match=r"text_config\.num_attention_heads: 'x'"):
        read_config(config)


def _with(base: Model, **changes: Any) -> Model:
    return msgspec.structs.replace(base, **changes)


LLAMA = get_model("llama3.2-1b")
DENSE = LLAMA.blocks[0]
ATTENTION = AttentionSpec(heads=32, kv_heads=8, head_dim=64, rotary=Rotary())


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("logit_softcap", _with(LLAMA, logit_softcap=30.0)),
        ("norm.kind", _with(LLAMA, norm=NormSpec(kind="layer", bias=True))),
        ("position_offset", _with(LLAMA, position_offset=2)),
        ("multi_token", _with(LLAMA, multi_token=MtpSpec(depth=1, block="dense"))),
        (
            "blocks.dense.mixer.window",
            _with(LLAMA, blocks=(msgspec.structs.replace(
                DENSE, mixer=msgspec.structs.replace(ATTENTION, window=128)),)),
        ),
        (
            "blocks.b.mlp.width",
            _with(
                LLAMA,
                blocks=(DENSE, BlockSpec(name="b", mixer=ATTENTION, mlp=MLPSpec(width=7))),
                pattern="15*dense b",
            ),
        ),
    ],
)  # fmt: skip
def test_what_a_family_cannot_say_is_refused_by_name(field: str, changed: Model) -> None:
    with pytest.raises(InputError) as caught:
        write_config(changed)
    assert field in {problem.where for problem in caught.value.problems}


def test_block_names_and_the_spelling_of_the_pattern_do_not_matter() -> None:
    renamed = msgspec.structs.replace(DENSE, name="layer")
    same = _with(LLAMA, blocks=(renamed,), pattern="4*(4*layer)")
    assert write_config(same) == write_config(LLAMA)


def test_model_without_attention_is_refused() -> None:
    bare = _with(LLAMA, blocks=(BlockSpec(name="dense", mlp=MLPSpec(width=8)),))
    with pytest.raises(InputError, match=r"blocks\.mixer: llama needs softmax attention"):
        write_config(bare)


def test_family_without_config_is_refused() -> None:
    with pytest.raises(InputError, match="family: there is no model type named 'mine'"):
        write_config(_with(LLAMA, family="mine"))


def test_config_is_loaded_from_a_file_and_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama3.1-8b"]))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(CONFIGS["llama3.1-8b"]))
    assert load_config(folder).name == "my-llama"
    assert load_config(folder / "config.json") == load_config(folder)
    assert load_config(other) == _with(load_config(folder), name="other")


def test_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": []}')
    with pytest.raises(InputError, match=r"config\.json: hidden_size: \[\] is not a whole number"):
        load_config(path)


def test_missing_and_broken_files_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        load_config(tmp_path)


def test_plain_rotary_and_none_are_told_apart() -> None:
    block = msgspec.structs.replace(DENSE, mixer=msgspec.structs.replace(ATTENTION, rotary=None))
    with pytest.raises(InputError, match=r"blocks\.dense\.mixer\.rotary"):
        write_config(_with(LLAMA, blocks=(block,)))
    plain = msgspec.structs.replace(DENSE, mixer=ATTENTION)
    assert write_config(_with(LLAMA, blocks=(plain,)))["rope_scaling"] is None
