"""The table of Megatron-LM's flags: which setting each one is, and which have no bearing here.

Names are those of megatron/training/arguments.py and of the dataclasses it builds flags from
(Megatron-LM, August 2026), with a few that older scripts still use.
"""

import re
from typing import Literal, NamedTuple

FlagForm = Literal["value", "words", "on", "off"]


class MegatronFlag(NamedTuple):
    """One flag."""

    name: str
    """As it is typed."""
    setting: str
    """The Megatron-Core setting it is."""
    form: FlagForm
    """A value follows, several words follow, or its presence turns the setting on or off."""
    group: str
    """The heading under which it is printed."""
    default: object
    """The value at which it is not printed."""


# A mark behind a name tells its form: + several words, ! turns on, ~ turns off.
_GROUPS = {
    "parallelism": """
        tensor-model-parallel-size sequence-parallel! context-parallel-size cp-comm-type+
        hierarchical-context-parallel-sizes+ pipeline-model-parallel-size
        num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage
        pipeline-model-parallel-layout decoder-first-pipeline-num-layers
        decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split!
        account-for-loss-in-pipeline-split! expert-model-parallel-size
        expert-tensor-parallel-size use-tp-pp-dp-mapping!""",
    "sharding": """
        use-distributed-optimizer! num-distributed-optimizer-instances use-megatron-fsdp!
        data-parallel-sharding-strategy use-torch-fsdp2! torch-fsdp2-no-reshard-after-forward~
        ckpt-format""",
    "batch": """
        micro-batch-size global-batch-size seq-length encoder-seq-length rampup-batch-size+
        step-batch-size-schedule""",
    "precision": """
        bf16! fp16! fp8-format fp8-recipe fp4-format fp4-recipe
        accumulate-allreduce-grads-in-fp32! grad-reduce-in-bf16~""",
    "optimizer": """
        optimizer use-precision-aware-optimizer! main-params-dtype main-grads-dtype exp-avg-dtype
        exp-avg-sq-dtype optimizer-cpu-offload! optimizer-offload-fraction
        cpu-offloading-num-layers fine-grained-activation-offloading! offload-modules+""",
    "recompute": """
        recompute-granularity recompute-method recompute-num-layers recompute-modules+
        recompute-activations! moe-layer-recompute!""",
    "overlap": """
        overlap-grad-reduce! overlap-param-gather! tp-comm-overlap! no-overlap-p2p-communication~
        overlap-p2p-communication! overlap-moe-expert-parallel-comm!""",
    "model": """
        num-layers hybrid-layer-pattern hybrid-override-pattern hidden-size ffn-hidden-size
        vocab-size make-vocab-size-divisible-by padded-vocab-size no-pad-vocab-size~
        disable-pad-vocab-size~ max-position-embeddings untie-embeddings-and-output-weights!
        normalization norm-epsilon layernorm-epsilon apply-layernorm-1p! swiglu! quick-geglu!
        squared-relu! glu-linear-offset activation-func-clamp-value disable-bias-linear~
        no-bias-gelu-fusion~ mtp-num-layers attention-dropout hidden-dropout""",
    "attention": """
        num-attention-heads group-query-attention! num-query-groups kv-channels add-qkv-bias!
        qk-layernorm! qk-l2-norm! window-size window-attn-skip-freq softmax-type
        attention-output-gate! multi-latent-attention! q-lora-rank kv-lora-rank qk-head-dim
        qk-pos-emb-head-dim v-head-dim experimental-attention-variant linear-attention-freq
        linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads
        linear-num-value-heads mamba-num-heads mamba-head-dim mamba-state-dim mamba-num-groups""",
    "positions": """
        position-embedding-type use-rotary-position-embeddings! rotary-base rotary-percent
        rotary-interleaved! rotary-seq-len-interpolation-factor use-rope-scaling!
        rope-scaling-factor rope-type no-rope-fusion~ no-rope-freq rotary-scaling-factor mscale
        mscale-all-dim yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow
        yarn-correction-range-round-to-int! no-yarn-correction-range-round-to-int~
        mrope-section+""",
    "experts": """
        num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk
        moe-shared-expert-intermediate-size moe-shared-expert-gate! moe-router-score-function
        moe-router-pre-softmax! moe-router-topk-scaling-factor moe-router-enable-expert-bias!
        moe-router-num-groups moe-router-group-topk moe-latent-size moe-grouped-gemm!
        moe-token-dispatcher-type""",
}

_RENAMED = {
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
    "grad-reduce-in-bf16": "grad_reduce_in_fp32",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "overlap-p2p-communication": "overlap_p2p_comm",
    "hybrid-override-pattern": "hybrid_layer_pattern",
    "no-pad-vocab-size": "pad_vocab",
    "disable-pad-vocab-size": "pad_vocab",
    "encoder-seq-length": "seq_length",
    "layernorm-epsilon": "norm_epsilon",
    "disable-bias-linear": "add_bias_linear",
    "no-bias-gelu-fusion": "bias_activation_fusion",
    "no-rope-fusion": "apply_rope_fusion",
    "no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
}

# Megatron's own defaults, for flags that would only repeat them. Degrees and sizes are always
# printed: a reader looks for them.
_DEFAULTS: dict[str, object] = {
    "context-parallel-size": 1,
    "cp-comm-type": "p2p",
    "expert-model-parallel-size": 1,
    "optimizer": "adam",
    "main-params-dtype": "fp32",
    "exp-avg-dtype": "fp32",
    "exp-avg-sq-dtype": "fp32",
    "rotary-percent": 1.0,
    "moe-router-score-function": "softmax",
}
_MARKS: dict[str, FlagForm] = {"+": "words", "!": "on", "~": "off"}


def _table() -> tuple[MegatronFlag, ...]:
    flags = []
    for group, names in _GROUPS.items():
        for entry in names.split():
            form = _MARKS.get(entry[-1], "value")
            name = entry if form == "value" else entry[:-1]
            setting = _RENAMED.get(name, name.replace("-", "_"))
            flags.append(MegatronFlag(f"--{name}", setting, form, group, _DEFAULTS.get(name)))
    return tuple(flags)


FLAGS = _table()
"""Every flag that is read."""

READ_ONLY = frozenset(
    {
        "--disable-pad-vocab-size",
        "--encoder-seq-length",
        "--hybrid-override-pattern",
        "--layernorm-epsilon",
        "--overlap-p2p-communication",
    }
)
"""Older or second names, which are understood and never written."""

ACTIVATIONS = {
    "swiglu": ("silu", True),
    "quick_geglu": ("quick_gelu", True),
    "squared_relu": ("squared_relu", False),
}
"""Flags that stand for an activation function and whether it is gated; none means plain GELU."""

LAUNCHER = re.compile(
    r"--(n(ode|nodes|proc[-_]per[-_]node)|nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_]\w+|"
    r"standalone|max[-_]restarts|tee|redirects|log[-_]dir|local[-_]ranks[-_]filter|no[-_]python|"
    r"module|monitor[-_]interval|role|run[-_]path|nodes|ntasks\S*|gpus\S*|gres|container\S*|"
    r"job[-_]name|partition|account|time|exclusive|export|output|error|mpi|cpus\S*|nodelist|"
    r"capture[-_]range\S*|cuda[-_]memory\S*|trace|force[-_]overwrite|sample|cpuctxsw)"
)
"""Flags of `torchrun`, `srun` and `nsys`, which stand before the script in a launch line."""

NOTED = {
    "--tensor-parallel-num-weight-shards": "weights sharded beyond tensor parallelism",
    "--expert-tensor-parallel-num-weight-shards": "weights sharded beyond tensor parallelism",
    "--hybrid-context-parallel": "context parallelism that changes from sequence to sequence",
    "--max-seqlen-per-dp-cp-rank": "context parallelism that changes from sequence to sequence",
    "--microbatch-group-size-per-virtual-pipeline-stage": "the size of an interleaved group",
    "--overlap-param-gather-with-optimizer-step": "gathering during the optimizer step",
    "--distribute-saved-activations": "checkpoints shared out over tensor parallelism",
    "--defer-embedding-wgrad-compute": "a weight gradient that is computed late",
    "--delay-wgrad-compute": "weight gradients that are computed late",
    "--first-last-layers-bf16": "layers kept out of FP8",
    "--num-layers-at-start-in-bf16": "layers kept out of FP8",
    "--num-layers-at-end-in-bf16": "layers kept out of FP8",
    "--fp8-param-gather": "weights that are kept and gathered in FP8",
    "--fp4-param-gather": "weights that are kept and gathered in FP4",
    "--fp8-quantizer-factory": "a recipe made in code",
    "--fp4-quantizer-factory": "a recipe made in code",
    "--te-precision-config-file": "a precision per layer",
    "--enable-full-sharding-in-hsdp": "sharding over both levels",
    "--outer-dp-sharding-strategy": "sharding over both levels",
    "--encoder-num-layers": "an encoder",
    "--decoder-num-layers": "an encoder and a decoder",
    "--decoder-seq-length": "an encoder and a decoder",
    "--heterogeneous-layers-config-path": "sizes that differ from layer to layer",
    "--heterogeneous-layers-config-encoded-json": "sizes that differ from layer to layer",
    "--moe-expert-capacity-factor": "dropped tokens (a job's moe.capacity_factor)",
    "--moe-expert-rank-capacity-factor": "dropped tokens",
    "--moe-pad-expert-input-to-capacity": "padded experts",
    "--enable-mhc-connections": "several residual streams",
    "--mtp-use-repeated-layer": "multi-token heads that share one layer",
    "--mtp-hybrid-override-pattern": "multi-token heads of their own kind",
    "--mtp-standalone": "a stage of its own for multi-token heads",
    "--apply-residual-connection-post-layernorm": "another place for the residual",
    "--moe-use-upcycling": "experts made from a dense model",
    "--no-position-embedding": "positions left out",
    "--use-checkpoint-args": "sizes that stand in a checkpoint",
    "--spec": "layers built by code",
    "--yaml-cfg": "settings in another file",
    "--batch-size": "a flag that Megatron-LM no longer takes (--micro-batch-size)",
    "--model-parallel-size": "a flag that Megatron-LM no longer takes",
    "--checkpoint-activations": "a flag that Megatron-LM no longer takes",
}
"""Flags that bear on layout or model and that neither can hold, with what they say."""

_IGNORED_PREFIXES = """
    activation-offload adam adlr allow app-tag apply-query apply-wd async attention-backend
    attention-softmax auto-detect batch-invariant bert biencoder block-data
    cache-mla calc-ft calculate-per-token-loss chat-template check ckpt classes clip-grad
    config-logger cpu-offloading-retain create-all cross-entropy cuda-graph data-args data-cache
    data-parallel-random data-path data-per dataloader ddp decode-only decoupled decrease-batch
    delay-offload delta-offload deterministic dino disable-align disable-bf16 disable-ckpt
    disable-clone disable-dsa disable-flight disable-fp8 disable-gloo disable-jit disable-log
    disable-mamba disable-manual disable-msc disable-save disable-straggler disable-strict
    disable-symmetric disable-tokenizer disable-tp-comm disable-use dist-ckpt distrib-optim
    distributed dsa dump-param embedding empty-unused enable-chunked enable-cuda-graph
    enable-experimental enable-ft enable-msc end-weight eod ep-overlap error-injection eval
    evidence exit external-cuda fake-process fault-injector fim fine-grained-offloading finetune
    flash flight-recorder fp16-lm fp32-residual fp8-amax fp8-interval fp8-margin fp8-output
    freeze fsdp-db fsdp-double fsdp-manual ft-num full-validation fused-residual gdp gpu-sniff
    grpo gtp head-lr help high-priority hybrid-attention hybrid-mlp hysteresis
    ict img indexer inference init-method init-model initial-loss inprocess is-hybrid iter
    iterations keep-fp8 kitchen langrl lazy-mpu lion load local-rank log logging logits
    loss-scale lr mamba-inference mamba-training manual-gc mask max-tokens megatron-fsdp
    memory-snapshot merge-file mhc mid-level min-loss min-lr min-offloaded mla-down mlp-chunks
    mock-data moe-apply-probs moe-aux moe-combine moe-deepep moe-dispatch moe-enable moe-flex
    moe-hybridep moe-input moe-mlp-glu moe-ncclep moe-pad-experts moe-paged moe-per-layer
    moe-permute moe-router-bias moe-router-dtype moe-router-force moe-router-fusion
    moe-router-load moe-router-padding moe-router-quantile moe-routing moe-shared-expert-glu
    moe-shared-expert-overlap moe-single moe-token-drop moe-upcycling moe-use-grouped moe-z-loss
    mtp-detach mtp-hsm mtp-loss multiple-validation muon mup nccl no-align no-barrier
    no-bias-dropout no-bias-swiglu
    no-check no-ckpt no-clone no-create no-data no-dsa no-flight no-fp8 no-gradient no-inference
    no-initialization no-load no-log no-manual no-masked no-mmap no-one-logger no-persist no-pin
    no-rl no-save no-strict no-tokenizer no-tp-comm no-use no-weight non-persistent
    null-tokenizer num-channels num-classes num-dataset num-speculative num-workers nvtx
    object-storage one-logger onnx openai-gelu optimizer-cuda otel output overlap-cpu
    overlap-dispatch overlap-p2p-communication-warmup override patch-dim per-dataset per-split
    perform-rl persistent-save phase pipeline-model-parallel-comm pretrained profile
    pytorch-profiler qk-clip query-in record refit relative replication rerun reset result
    retriever reuse-grad rl run-workload sample save seed sft sgd sharp short-seq skip-train
    split start-eval start-weight straggler suggested swin symmetric te-rng tensorboard test
    tiktoken timing titles tokenizer tp-comm-bootstrap tp-comm-overlap-cfg tp-comm-overlap-rs
    train transformer-impl trust use-checkpoint-opt use-checkpoint-opt_param use-cpu
    use-dist-ckpt use-flash use-fused use-gigatoken use-grouped use-kitchen use-legacy use-mcore
    use-mp-args use-mup use-nccl use-one use-persistent use-pytorch use-ring use-same use-sharp
    use-te-activation use-torch-optimizer use-transformer valid validation verify vision
    vocab-extra vocab-file wandb warmup weight-decay wgrad
"""
IGNORED = re.compile(
    rf"--(?:{'|'.join(sorted(set(_IGNORED_PREFIXES.split()), key=len, reverse=True))})(?:-.*)?"
)
"""Flags about data, learning rate, logs, checkpoints, kernels and the like."""
