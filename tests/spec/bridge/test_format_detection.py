"""Settings of one kind given to the bridge of another."""

import json
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.spec.bridge import BRIDGES
from meshwright.spec.bridge.format_detection import detect_format
from meshwright.spec.file_formats import dump_data
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.spec.serialization import encode

MODEL = build_decoder_model("m", layers=8, hidden=512, heads=8, ffn=1024, vocab=1024)
LAYOUT = Layout(tp=2, sequence_parallel=True, dp=4, zero=1, global_batch=64)
WORK: dict[str, Any] = {
    "model": "llama3.1-70b",
    "cluster": "h100-superpod",
    "gpus": 512,
    "layout": {"tp": 4, "pp": 4, "zero": 1, "global_batch": 1024},
    "workload": {"tokens": "15T", "sequence_length": 8192},
}
WRITTEN_OUT = WORK | {"model": encode(MODEL)}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP",
              "fsdp_config": {"fsdp_version": 2}, "num_processes": 8}  # fmt: skip
SAMPLES: dict[str, tuple[str | dict[str, Any], str, str]] = {
    "work file": (dump_data(WORK, ".toml"), "", "a Meshwright work file"),
    "work file in JSON": (json.dumps(WORK), "", "a Meshwright work file"),
    "work file in YAML": (yaml.safe_dump(WORK), "", "a Meshwright work file"),
    "work file with its model": (dump_data(WRITTEN_OUT, ".toml"), "", "a Meshwright work file"),
    "work as data": (WRITTEN_OUT, "", "a Meshwright work file"),
    "layout": (dump_data(WORK["layout"], ".toml"), "", "a Meshwright layout"),
    "model": (dump_data(encode(MODEL), ".toml"), "", "a Meshwright model"),
    "config.json": (json.dumps(CONFIG), "", "a Hugging Face config.json"),
    "accelerate": (yaml.safe_dump(ACCELERATE), "fsdp2", "an Accelerate configuration"),
    "accelerate as data": (ACCELERATE, "fsdp2", "an Accelerate configuration"),
}
for _name, _title in (
    ("megatron", "a list of Megatron-LM flags"), ("torchtitan", "a torchtitan job file"),
    ("deepspeed", "a DeepSpeed configuration"), ("fsdp2", "an FSDP2 snippet"),
    ("nemo", "a NeMo or Megatron-Bridge configuration"),
):  # fmt: skip
    _exported = BRIDGES[_name].export_config(LAYOUT, MODEL, sequence_length=512)
    SAMPLES[_name] = (_exported.text, _name, _title)
    SAMPLES[f"{_name} as data"] = (_exported.data, _name, _title)
PAIRS = [(s, t) for s, (_, own, _) in SAMPLES.items() for t in BRIDGES if t != own]


@pytest.mark.parametrize("sample", SAMPLES)
def test_each_kind_is_told_by_its_names(sample: str) -> None:
    given, _, title = SAMPLES[sample]
    kind = detect_format(given)
    assert kind is not None
    assert kind.title == title


@pytest.mark.parametrize(("sample", "target"), PAIRS)
def test_settings_of_another_kind_are_refused_and_named(sample: str, target: str) -> None:
    given, own, title = SAMPLES[sample]
    with pytest.raises(InputError) as caught:
        BRIDGES[target].import_config(given)
    [problem] = caught.value.problems
    assert problem.what.startswith(f"this is {title}, not ")
    assert problem.fix == f"import it with --from {own}" if own else problem.fix


def test_a_work_file_is_sent_to_the_commands_that_read_it() -> None:
    with pytest.raises(InputError, match="mw layout check"):
        BRIDGES["torchtitan"].import_config(dump_data(WORK, ".toml"))


@pytest.mark.parametrize("target", BRIDGES)
@pytest.mark.parametrize(
    "text", ["It isn't a configuration: at all.", "a: 1\nb: 2\n", "a = 1\n", '{"a": 1}', "--a 1"]
)
def test_what_looks_like_nothing_is_refused_with_what_to_give(target: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        BRIDGES[target].import_config(text)
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("megatron", "--bf16 --output_dir x --learning_rate 1 --per_device_eval 2 --report_to y"),
        ("torchtitan", '[model]\nname = "m"\n[plan]\na = 1\nb = 2\nc = 3\nd = 4\n'),
        ("deepspeed", '{"fp16": {"enabled": true}, "a": 1, "b": 2, "c": 3, "d": 4}'),
    ],
)
def test_one_name_in_common_does_not_make_it_the_target_s(target: str, text: str) -> None:
    with pytest.raises(InputError, match="there are no"):
        BRIDGES[target].import_config(text)
