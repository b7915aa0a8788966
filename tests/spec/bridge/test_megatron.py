"""Megatron-LM's flags: text that pastes, scripts that read."""

import re
import shlex
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.spec.bridge.megatron import export_config, import_config
from meshwright.spec.bridge.megatron.flags import FLAGS, IGNORED, NOTED, READ_ONLY
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import Model, MoESpec, build_decoder_model, build_gpt

SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=4  # two GPUs would do as well
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --ffn-hidden-size=14336
    --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 32000
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --max-position-embeddings 4096 --seq-length 4096
    --num-experts 8 --moe-router-topk 2
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP --sequence-parallel
    # --pipeline-model-parallel-size 8
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    "--use-distributed-optimizer" "--micro-batch-size 2"
    --global-batch-size 256 --bf16 --overlap-grad-reduce --overlap-param-gather
)
TRAIN="--lr 1e-4 --min-lr 1e-5 --clip-grad 1.0"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} \\
    $TRAIN --tokenizer-model ${TOKENIZER} 2>&1 | tee log.txt
"""


def flags(**changes: Any) -> str:
    base = {"--micro-batch-size": 1, "--bf16": True, **changes}
    return " ".join(key if value is True else f"{key} {value}" for key, value in base.items())


def test_the_text_pastes_into_a_shell() -> None:
    layout = Layout(tp=8, sequence_parallel=True, pp=4, dp=2, zero=1)
    model = build_decoder_model("m", layers=8, hidden=512, heads=8, ffn=1024, vocab=1024)
    lines = export_config(layout, model).text.splitlines()
    body = [line for line in lines if not line.startswith("#")]
    assert all(line.endswith("\\") for line in body[:-1])
    assert not body[-1].endswith("\\")
    assert all(len(line) <= 100 for line in body)
    words = shlex.split("\n".join(body))
    assert words[:2] == ["--tensor-model-parallel-size", "8"]


def test_comments_stand_only_above_the_flags() -> None:
    text = export_config(Layout(pp=4, schedule="zb-h1")).text
    assert re.fullmatch(r"(#.*\n)+(--.*\n)+", text)
    assert "layout.schedule" in text


def test_a_whole_launch_script_is_read() -> None:
    imported = import_config(SCRIPT)
    assert imported.layout == Layout(
        tp=4, sequence_parallel=True, dp=8, ep=8, expert_tp=1, zero=1, microbatch=2,
        global_batch=256,
    )  # fmt: skip
    expected = build_decoder_model(
        "imported", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32256,
        experts=MoESpec(count=8, top_k=2, width=14336),
    )  # fmt: skip
    # 32,000 rows are padded to a multiple of 128 × tp.
    assert imported.model == expected
    assert imported.sequence_length == 4096
    assert {"--lr", "--min-lr", "--nnodes"} <= set(imported.ignored)
    assert imported.unknown == ()


def test_the_number_of_gpus_may_be_given_and_decides() -> None:
    assert import_config(SCRIPT, gpus=64).layout.dp == 16
    assert import_config(flags(), gpus=8).layout.dp == 8


def test_without_a_number_of_gpus_the_least_that_fits_is_read_and_said() -> None:
    imported = import_config(flags(**{"--expert-model-parallel-size": 8}))
    assert imported.layout.dp == 8
    assert imported.unknown[0].where == "gpus"


def test_a_mistyped_flag_is_refused_with_the_right_one() -> None:
    with pytest.raises(InputError, match="did you mean --tensor-model-parallel-size"):
        import_config("--tensor-model-paralel-size 8")


def test_every_problem_is_listed_at_once() -> None:
    text = "--tensor-model-parallel-size x --optimizer adm --micro-batch-size --pipeline-size 2"
    with pytest.raises(InputError) as caught:
        import_config(text)
    named = {problem.where for problem in caught.value.problems}
    assert named >= {"--tensor-model-parallel-size", "--optimizer", "--micro-batch-size"}


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(InputError, match=re.escape("$TP")):
        import_config("--tensor-model-parallel-size $TP")


def test_a_flag_of_a_fork_is_reported_and_not_refused() -> None:
    imported = import_config(flags(**{"--our-own-flag": 3}))
    assert [problem.where for problem in imported.unknown if problem.where != "gpus"] == [
        "--our-own-flag"
    ]


def test_a_flag_that_no_layout_holds_is_reported() -> None:
    imported = import_config(flags(**{"--hybrid-context-parallel": True}), gpus=1)
    assert [problem.where for problem in imported.unknown] == ["--hybrid-context-parallel"]


@pytest.mark.parametrize(
    ("given", "virtual", "split"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 4, None),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, None),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7", 1,
         (7, 9, 9, 7)),
        ("--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8 "
         "--num-virtual-stages-per-pipeline-rank 2", 2, (2, 5, 5, 4, 2, 5, 5, 4)),
        ("--pipeline-model-parallel-layout 'Et*7|(t*9|)*2,t*7mL'", 1, (7, 9, 9, 7)),
        ("--pipeline-model-parallel-layout 'Ettt|(t*4|)*6,t*5,L'", 2, (3, 4, 4, 4, 4, 4, 4, 5)),
    ],
)  # fmt: skip
def test_every_way_to_split_the_pipeline_is_read(
    given: str, virtual: int, split: tuple[int, ...] | None
) -> None:
    text = f"--num-layers 32 --pipeline-model-parallel-size 4 {given}"
    layout = import_config(text, gpus=4).layout
    assert (layout.virtual_stages, layout.stage_layers) == (virtual, split)


def test_counting_embedding_and_loss_as_layers_makes_smaller_ends() -> None:
    text = (
        "--num-layers 30 --pipeline-model-parallel-size 4 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    )
    assert import_config(text, gpus=4).layout.stage_layers == (7, 8, 8, 7)


@pytest.mark.parametrize(
    "text",
    [
        "--num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|tX'",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|tL'",
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 "
        "--num-experts 4 --moe-layer-freq '[1]*9'",
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 "
        "--num-experts 4 --moe-layer-freq '__import__(1)'",
        "--hybrid-layer-pattern MxM --hidden-size 64 --vocab-size 99",
        "--fp16 --bf16",
        "--tensor-model-parallel-size 'unclosed",
    ],
)
def test_what_megatron_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        import_config(text, gpus=8)


SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 "
    "--position-embedding-type rope "
)


@pytest.mark.parametrize(
    ("flags_", "where"),
    [
        ("--group-query-attention --num-query-groups 3", "--num-query-groups"),
        ("--num-experts 4 --moe-router-topk 8", "--moe-router-topk"),
        ("--rotary-percent 2", "--rotary-percent"),
        ("--window-size 4", "--window-size"),
        ("--norm-epsilon -1", "--norm-epsilon"),
        ("--position-embedding-type rpe", "--position-embedding-type"),
        ("--rope-type x --multi-latent-attention", "--rope-type"),
        ("--num-attention-heads 5", "--num-attention-heads"),
        ("--no-rope-freq 0", "--no-rope-freq"),
    ],
)
def test_a_wrong_size_of_the_model_names_its_flag(flags_: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        import_config(SMALL + flags_)
    assert where in {problem.where for problem in caught.value.problems}


@pytest.mark.parametrize(
    "flags_",
    [
        "--fp8-format hybrid --fp8-recipe custom",
        "--optimizer soap",
        "--softmax-type off-by-one",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        "--recompute-granularity selective --recompute-modules core_attn mhc",
        "--cp-comm-type p2p a2a",
        "--rampup-batch-size 32 32 1000",
        "--exp-avg-dtype bf16",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "--window-size 4,4",
        "--num-experts 4 --moe-router-score-function sqrtsoftplus",
        "--activation-func-clamp-value 3",
        "--multi-latent-attention",
    ],
)
def test_what_a_layout_or_model_holds_only_in_part_is_said(flags_: str) -> None:
    imported = import_config(f"{SMALL} {flags_}", gpus=1)
    assert imported.unknown


def test_fp16_sums_gradients_in_fp16_and_bf16_in_fp32_unless_told_otherwise() -> None:
    assert import_config("--fp16").layout.gradient_precision == "fp16"
    told = import_config("--fp16 --accumulate-allreduce-grads-in-fp32")
    assert told.layout.gradient_precision == "fp32"
    assert import_config("--bf16").layout.gradient_precision == "fp32"
    assert import_config("--bf16 --grad-reduce-in-bf16").layout.gradient_precision == "bf16"


def test_a_gpt_without_any_switch_is_read_as_megatron_builds_it() -> None:
    text = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --vocab-size 50257 --micro-batch-size 4"
    )
    expected = build_gpt(
        "imported", layers=24, hidden=1024, heads=16, vocab=50304, max_positions=1024,
        activation="gelu-tanh", family="llama",
    )  # fmt: skip
    assert import_config(text).model == expected


UNSIZED = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu --bf16"


def test_the_tokenizer_s_vocabulary_may_be_given_and_is_padded() -> None:
    text = f"{UNSIZED} --tensor-model-parallel-size 8 --tokenizer-type HuggingFaceTokenizer"
    model = import_config(text, gpus=8, vocab=128256).model
    assert model is not None
    assert model.vocab == 129024  # a multiple of 128 × tp


def test_a_vocabulary_in_the_flags_goes_before_the_one_given() -> None:
    model = import_config(f"{UNSIZED} --vocab-size 1024", vocab=128256).model
    assert model is not None
    assert model.vocab == 1024


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (UNSIZED, ["--vocab-size"]),
        ("--num-layers 4 --hidden-size 512 --bf16", ["--num-attention-heads", "--vocab-size"]),
        ("--num-layers 4 --num-attention-heads 8 --vocab-size 99", ["--hidden-size"]),
        ("--hybrid-layer-pattern M-M- --vocab-size 99", ["--hidden-size"]),
    ],
)
def test_a_model_in_part_names_the_flags_it_lacks_and_no_others(
    text: str, missing: list[str]
) -> None:
    imported = import_config(text, gpus=1)
    assert imported.model is None
    [problem] = imported.unknown
    assert problem.where == missing[0]
    assert re.findall(r"--[\w-]+", problem.what) == missing
    assert set(re.findall(r"--[\w-]+", problem.fix)) == set(missing)


def test_flags_of_a_layout_alone_lack_no_model() -> None:
    assert import_config("--bf16 --micro-batch-size 1", gpus=1).unknown == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 2}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"cp": 2, "dp": 2, "zero": 1}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"tp": 2, "dp": 2, "zero": 3}, "Leave CUDA_DEVICE_MAX_CONNECTIONS unset"),
        ({"dp": 4, "ep": 4, "overlap_ep": True}, "CUDA_DEVICE_MAX_CONNECTIONS above 1"),
        ({"tp": 2, "dp": 4, "ep": 4, "overlap_ep": True}, "1 favours tp and cp"),
    ],
)
def test_the_environment_that_megatron_asks_for_is_said(fields: dict[str, Any], said: str) -> None:
    comments = [
        line for line in export_config(Layout(**fields)).text.splitlines() if line[0] == "#"
    ]
    assert said in comments[-1]


def test_nothing_is_asked_of_the_environment_without_need() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in export_config(Layout(pp=2, dp=4, zero=1)).text


def test_a_model_is_written_without_dropout_because_megatron_drops_a_tenth() -> None:
    model = build_decoder_model("m", layers=2, hidden=64, heads=4, ffn=128, vocab=256)
    data = export_config(Layout(), model).data
    assert (data["--attention-dropout"], data["--hidden-dropout"]) == ("0.0", "0.0")
    assert "--hidden-dropout" not in export_config(Layout()).data


def test_a_dropout_is_said_not_to_be_held() -> None:
    imported = import_config(f"{SMALL} --hidden-dropout 0.1 --attention-dropout 0", gpus=1)
    assert [problem.where for problem in imported.unknown] == ["--hidden-dropout"]


def test_a_window_counts_the_token_itself() -> None:
    model = build_decoder_model("m", layers=2, hidden=64, heads=4, ffn=128, vocab=256)
    attention = model.blocks[0].mixer
    assert attention is not None
    text = export_config(Layout(), with_window(model, 4096)).text
    assert "--window-size 4095,0" in text
    back = import_config(text).model
    assert back is not None
    assert back.blocks[0].mixer == with_window(model, 4096).blocks[0].mixer


def with_window(model: Model, window: int) -> Model:
    import msgspec

    block = model.blocks[0]
    assert block.mixer is not None
    mixer = msgspec.structs.replace(block.mixer, window=window)
    return msgspec.structs.replace(model, blocks=(msgspec.structs.replace(block, mixer=mixer),))


def test_a_padded_vocabulary_is_said() -> None:
    model = build_decoder_model("m", layers=2, hidden=64, heads=4, ffn=128, vocab=50257)
    exported = export_config(Layout(tp=2), model)
    assert [problem.where for problem in exported.unexpressed] == ["model.vocab"]
    assert "50258" in exported.unexpressed[0].what


def test_sizes_that_the_layout_leaves_open_are_said() -> None:
    exported = export_config(Layout(cp=8, cp_kind="ring+ulysses", dp=2))
    assert exported.assumed[0].where == "layout.cp_kind"
    assert "--hierarchical-context-parallel-sizes 2 4" in exported.text


def test_activations_go_to_the_host_where_the_model_says_how_many_layers() -> None:
    layout = Layout(offload=("activations",))
    model = build_decoder_model("m", layers=8, hidden=64, heads=4, ffn=128, vocab=256)
    assert export_config(layout).unexpressed
    assert not export_config(layout, model).unexpressed


def test_a_number_of_offloaded_layers_is_a_flag() -> None:
    layout = Layout(offload=("activations",), offload_layers=3)
    exported = export_config(layout)
    assert exported.data["--cpu-offloading-num-layers"] == "3"
    assert not exported.unexpressed
    assert not exported.assumed
    assert import_config(exported.text).layout == layout


def test_activations_of_the_last_layer_cannot_be_offloaded() -> None:
    model = build_decoder_model("m", layers=8, hidden=64, heads=4, ffn=128, vocab=256)
    exported = export_config(Layout(offload=("activations",), offload_layers=8), model)
    assert exported.data["--cpu-offloading-num-layers"] == "7"
    assert [problem.where for problem in exported.unexpressed] == ["layout.offload_layers"]


def test_no_flag_is_both_read_and_passed_over() -> None:
    names = {flag.name for flag in FLAGS} - {"--ckpt-format"}
    assert not [name for name in {*names, *NOTED} if IGNORED.fullmatch(name)]
    assert not names & set(NOTED)
    assert names >= READ_ONLY


def test_flags_may_come_as_a_table() -> None:
    given = {"--tensor-model-parallel-size": 2, "bf16": True, "--fp16": False}
    assert import_config(given, gpus=2).layout == Layout(tp=2, overlap_gradients=False)


def test_the_split_line_is_the_one_megatron_core_reads() -> None:
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layout = Layout(pp=4, virtual_stages=2, schedule="interleaved",
                    stage_layers=(3, 4, 4, 4, 4, 0, 1, 0))  # fmt: skip
    line = str(export_config(layout).data["--pipeline-model-parallel-layout"]).strip("'")
    parsed = core.PipelineParallelLayerLayout.parse_str_to_list(line)
    counts = [sum(kind.name == "decoder" for kind in chunk) for chunk in parsed]
    assert tuple(counts) == layout.stage_layers
