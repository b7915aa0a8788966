"""FSDP2 snippets, and Accelerate's YAML."""

import pytest

from meshwright.errors import InputError
from meshwright.spec.bridge.fsdp2 import export_config, import_config
from meshwright.spec.layout.layout import Layout

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
gradient_accumulation_steps: 4
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
"""
HAND_WRITTEN = """
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy())
optim = torch.optim.SGD(model.parameters(), lr=1e-3)
"""


def test_a_hand_written_snippet_is_read_and_not_run() -> None:
    assert import_config(HAND_WRITTEN).layout == Layout(
        dp=8, shard=4, zero=2, optimizer="sgd", offload=("gradients", "optimizer", "parameters")
    )


def test_accelerate_s_file_is_read() -> None:
    imported = import_config(ACCELERATE)
    assert imported.layout == Layout(tp=2, dp=8, shard=4, zero=3, recompute="full", global_batch=32)
    assert "fsdp_config.fsdp_auto_wrap_policy" in imported.ignored


def test_fsdp1_is_said_to_be_read_as_fsdp2() -> None:
    text = ACCELERATE.replace("fsdp_version: 2", "fsdp_version: 1")
    assert "fsdp_config.fsdp_version" in {problem.where for problem in import_config(text).unknown}


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_accelerate_s_file_for_another_engine_is_refused(engine: str) -> None:
    with pytest.raises(InputError, match=f"{engine} is set up there"):
        import_config(f"distributed_type: {engine}\nmixed_precision: bf16\nnum_processes: 8\n")


def test_the_learning_rate_is_left_to_the_user() -> None:
    text = export_config(Layout(dp=4, zero=3)).text
    assert "lr=learning_rate" in text
    assert "# learning_rate is yours to set" in text


def test_a_mesh_of_other_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="holds 8 GPUs, not 4"):
        import_config(HAND_WRITTEN, gpus=4)


def test_text_without_fsdp_is_refused() -> None:
    with pytest.raises(InputError, match="no FSDP2 settings"):
        import_config("print('hello')")
    with pytest.raises(InputError, match="neither Python nor"):
        import_config("for for for")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, zero=3, recompute="full"),
        Layout(dp=8, zero=2, shard=4, cp=2),
        Layout(tp=2, pp=2, dp=2, zero=3, order="ep-dp-tp-cp-pp"),
        Layout(dp=4, optimizer="sgd"),
    ],
)
def test_the_snippet_runs_in_torch(layout: Layout) -> None:
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    import torch.distributed as dist

    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=layout.gpus)
    try:
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        names = {"model": model, "learning_rate": 1e-3}
        exec(export_config(layout).text.replace('"cuda"', '"cpu"'), names)
        shards = {p.device_mesh.size() for p in names["model"].parameters()}
        assert shards == {layout.dp * layout.cp}
    finally:
        dist.destroy_process_group()
