"""Random small questions, made so that every layout of each can be tried.

Fields are fixed at random and then freed one after the other as long as the layouts stay few, so
that over many questions every field is free in some, beside every other.
"""

from itertools import islice
from random import Random
from typing import Any

from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import LayoutSpace, PlanQuestion
from meshwright.predict.training_run.training_framework import (
    EAGER,
    MEGATRON,
    MEGATRON_2021,
    MESHWRIGHT,
    TrainingFramework,
)
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXIS_ORDERS, MULTI_CHUNK_SCHEDULES
from meshwright.spec.model import (
    BlockSpec,
    LatentAttentionSpec,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    build_decoder_model,
    build_gpt,
)
from meshwright.spec.workload import LoRASpec, TrainingWorkload
from tests.predict.plan.exhaustive import Every

GRAPHS = TrainingFramework(cuda_graphs=True, dispatcher="deepep")
BASES = (
    Layout(),
    Layout(),
    Layout(gradient_precision="bf16", moment_precision="bf16"),
    Layout(optimizer="muon", master_precision="none"),
)
"""What the user decides and no search changes."""


def model_of(random: Random) -> Model:
    """Return a model of few layers: dense, grouped, sparse, or latent with further heads."""
    layers, heads = random.randint(1, 7), random.choice([4, 8, 12, 16])
    hidden = heads * random.choice([64, 128])
    vocab = random.choice([512, 32000, 128256])
    kind = random.choice(["gpt", "grouped", "experts", "latent", "heads"])
    ffn = hidden * random.choice([2, 4])
    if kind == "gpt":
        positions = random.choice([2048, 8192])
        return build_gpt("small", layers=layers, hidden=hidden, heads=heads, vocab=vocab,
                   max_positions=positions)  # fmt: skip
    kv = random.choice([n for n in (1, 2, 4, heads) if heads % n == 0])
    if kind == "grouped":
        return build_decoder_model(
            "small",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv,
            ffn=ffn,
            vocab=vocab,
            tied=random.random() < 0.5,
        )
    count = random.choice([4, 6, 8, 16])
    experts = MoESpec(
        count=count,
        top_k=random.choice([1, 2, 4]),
        width=hidden * random.choice([1, 2]) // 2,
        shared_width=random.choice([0, hidden // 2]),
    )
    dense = random.randint(0, layers - 1)
    if kind == "experts":
        return build_decoder_model(
            "small",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv,
            ffn=ffn,
            vocab=vocab,
            experts=experts,
            dense_layers=dense,
        )
    latent = LatentAttentionSpec(
        heads=heads, kv_rank=hidden // 4, nope_dim=64, rope_dim=32, value_dim=64,
        q_rank=random.choice([None, hidden // 2]),
    )  # fmt: skip
    blocks = (
        BlockSpec(name="dense", mixer=latent, mlp=MLPSpec(width=ffn)),
        BlockSpec(name="moe", mixer=latent, mlp=experts),
    )
    pattern = f"{dense}*dense {layers - dense}*moe" if dense else f"{layers}*moe"
    further = MtpSpec(depth=random.choice([1, 2]), block="moe") if kind == "heads" else None
    return Model(name="small", hidden=hidden, vocab=vocab, blocks=blocks, pattern=pattern,
                 multi_token=further)  # fmt: skip


def cluster_of(random: Random) -> Cluster:
    """Return a cluster of at most 64 GPUs, with a fast fabric, a slow one or one node only."""
    name = random.choice(["h100-superpod", "aws-p4d", "a100-pcie-box", "l40s-pcie", "gb200-nvl72"])
    known = catalog.get_cluster(name)
    node = random.choice([2, 4, 8]) if name != "gb200-nvl72" else 4
    nodes = random.choice([1, 2, 3, 4, 8]) if known.nics is not None else 1
    domain = known.scale_up.gpus
    if domain < 72:
        domain = min(domain, node)
    nics = known.nics
    if nics is not None and nics.per_node > node:
        nics = replace(nics, per_node=node, rails=None)
    scale_up = replace(known.scale_up, gpus=domain)
    return replace(
        known, gpus_per_node=node, nodes=nodes, max_nodes=None, scale_up=scale_up, nics=nics
    )


def question_of(random: Random, most: int) -> PlanQuestion:
    """Return a question with at most about `most` layouts, memory tight in many."""
    question = _drawn(random, most)
    every = Every(question)
    while not any(map(every.sound, islice(every.layouts(), 2000))) and random.random() < 0.95:
        question = _drawn(random, most)
        every = Every(question)
    return _tight(random, question)


def _drawn(random: Random, most: int) -> PlanQuestion:
    model, cluster = model_of(random), cluster_of(random)
    batch = cluster.gpus * random.choice([1, 2, 3, 4, 8])
    length = random.choice([1024, 2048, 4096])
    if model.positions == "learned":
        length = min(length, model.max_positions)
    adapter = LoRASpec(rank=16) if random.random() < 0.1 else None
    workload = TrainingWorkload(
        tokens=10**9,
        sequence_length=length,
        global_batch=batch,
        adapter=adapter,
        expert_imbalance=random.choice([1.0, 1.0, 1.4]) if model.moe else 1.0,
    )
    precision = tuple(random.sample(_precisions(cluster), random.choice([1, 1, 2])))
    fixed = {**_fixed(random, model, cluster, batch), "precision": precision}
    space = LayoutSpace(
        base=random.choice(BASES),
        fixed=fixed,
        fit_scale_up_domain=random.random() < 0.15,
        max_memory=random.choice([1.0, 1.0, 0.9]),
    )
    question = PlanQuestion(
        model=model,
        cluster=cluster,
        workload=workload,
        space=space,
        framework=random.choice([MEGATRON, MEGATRON, EAGER, MEGATRON_2021, MESHWRIGHT, GRAPHS]),
    )
    return _freed(random, question, most)


def _precisions(cluster: Cluster) -> list[str]:
    wanted = ("bf16", "fp16", "fp8-tensorwise", "mxfp8")
    return [name for name in wanted if name in cluster.gpu.precisions]


def _fixed(random: Random, model: Model, cluster: Cluster, batch: int) -> dict[str, Any]:
    """Return one value of every field that a search decides."""
    gpus, layers = cluster.gpus, model.layers
    tp = _divisor(random, gpus, 8)
    cp = _divisor(random, gpus // tp, 4) if random.random() < 0.4 else 1
    pp = _divisor(random, gpus // (tp * cp), layers)
    dp = gpus // (tp * cp * pp)
    schedule = random.choice(
        ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"]
    )
    ep = _divisor(random, tp * cp * dp, 16)
    experts = model.moe
    while experts is not None and (experts.count % ep or gpus % ep):
        ep -= 1
    order = random.choice(sorted(AXIS_ORDERS))
    if experts is not None:
        order = "-".join([axis for axis in order.split("-") if axis != "pp"] + ["pp"])
    kind = random.choice(["none", "none", "selective", "full"])
    return {
        "tp": (tp,),
        "cp": (cp,),
        "pp": (pp,),
        "microbatch": (_divisor(random, batch // dp, 8),),
        "sequence_parallel": (random.random() < 0.7,),
        "cp_kind": (random.choice(["ring", "allgather", "ulysses"]),),
        "ep": (ep,),
        "expert_tp": (_divisor(random, tp * cp * dp // ep, 2),),
        "schedule": (schedule,),
        "virtual_stages": (2,) if schedule in MULTI_CHUNK_SCHEDULES else (1,),
        "stage_layers": (None,),
        "recompute": (kind,),
        "recompute_ops": (("core_attn",), ("core_attn", "layernorm")),
        "zero": tuple(random.sample(range(4), random.choice([1, 1, 2]))),
        "shard": (None,),
        "overlap_gradients": (random.random() < 0.7,),
        "overlap_parameters": (random.random() < 0.7,),
        "overlap_tp": (random.random() < 0.5,),
        "overlap_pp": (random.random() < 0.7,),
        "overlap_ep": (random.random() < 0.5,),
        "order": (order,),
        "offload": ((),),
    }


def _divisor(random: Random, number: int, most: int) -> int:
    return random.choice([d for d in range(1, min(number, most) + 1) if number % d == 0])


def _freed(random: Random, question: PlanQuestion, most: int) -> PlanQuestion:
    """Free fields in a random order, as long as layouts stay few."""
    names = [name for name in question.space.fixed if name not in ("precision", "offload")]
    random.shuffle(names)
    misses = 0
    for name in names:
        rest = {key: value for key, value in question.space.fixed.items() if key != name}
        wider = replace(question, space=replace(question.space, fixed=rest))
        if sum(1 for _ in islice(Every(wider).fields(), most + 1)) <= most:
            question = wider
        else:
            misses += 1
        if misses == 4:
            break
    return question


def _tight(random: Random, question: PlanQuestion) -> PlanQuestion:
    """Give GPUs about as much memory as some layout of the question needs."""
    every = Every(question)
    sound = [one for one in islice(every.layouts(), 4000) if every.sound(one)]
    if not sound or random.random() < 0.2:
        return question
    needed = predict_memory(question.build_run(random.choice(sound))).worst_stage.total_bytes
    gpu = replace(question.cluster.gpu, memory_bytes=round(needed * random.uniform(0.9, 1.2)))
    return replace(question, cluster=replace(question.cluster, gpu=gpu))
