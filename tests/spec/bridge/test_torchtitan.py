"""torchtitan's TOML."""

import tomllib

import pytest

from meshwright.errors import InputError
from meshwright.spec.bridge.torchtitan import export_config, import_config
from meshwright.spec.bridge.torchtitan.flavors import get_flavor_model
from meshwright.spec.layout.layout import Layout

JOB = """
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
steps = 3000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


def test_a_job_file_is_read_with_its_model() -> None:
    imported = import_config(JOB, gpus=128, name="mine")
    assert imported.layout == Layout(
        tp=8, sequence_parallel=True, dp=16, zero=3, recompute="full", microbatch=2,
        precision="fp8-tensorwise", overlap_tp=True,
    )  # fmt: skip
    assert imported.model is not None
    assert (imported.model.name, imported.model.layers) == ("mine", 126)
    assert imported.sequence_length == 8192
    assert "training.steps" in imported.ignored


def test_a_model_is_written_as_the_flavor_that_has_its_shape() -> None:
    model = get_flavor_model("qwen3", "30B-A3B")
    assert model is not None
    exported = export_config(Layout(dp=8, zero=3), model, sequence_length=4096)
    assert exported.unexpressed == ()
    data = tomllib.loads(exported.text)
    assert (data["model"]["name"], data["model"]["flavor"]) == ("qwen3", "30B-A3B")
    assert data["training"]["seq_len"] == 4096


def test_an_even_split_is_asked_for_because_torchtitan_favours_the_ends() -> None:
    data = tomllib.loads(export_config(Layout(pp=2, global_batch=4)).text)["parallelism"]
    assert data["pipeline_parallel_first_stage_less_layers"] == 0
    assert data["pipeline_parallel_last_stage_less_layers"] == 0


def test_the_favoured_ends_are_read_as_an_uneven_split() -> None:
    text = JOB + '\n[job]\ndescription = "x"\n'
    text = text.replace(
        "tensor_parallel_degree = 8", "tensor_parallel_degree = 8\npipeline_parallel_degree = 4"
    )
    layout = import_config(text, gpus=128).layout
    # 126 layers with embedding and head as one layer each: 128 / 4.
    assert layout.stage_layers == (31, 32, 32, 31)


def test_more_chunks_than_two_are_written_as_module_lists() -> None:
    model = get_flavor_model("qwen3", "8B")
    assert model is not None
    layout = Layout(pp=4, virtual_stages=3, schedule="interleaved", global_batch=8)
    exported = export_config(layout, model)
    assert exported.unexpressed == ()
    parts = exported.data["parallelism"]["module_fqns_per_model_part"]
    assert (len(parts), parts[0][0], parts[-1][-1]) == (12, "tok_embeddings", "output")


def test_selective_recompute_of_every_second_layer_counts_layers_per_chunk() -> None:
    text = JOB.replace('mode = "full"', 'mode = "selective"\nselective_ac_option = "2"')
    layout = import_config(text, gpus=128).layout
    assert (layout.recompute, layout.recompute_layers) == ("full", 63)


def test_command_line_words_are_read() -> None:
    text = "./run_train.sh --parallelism.tensor_parallel_degree 4 --training.local_batch_size=3"
    layout = import_config(text, gpus=4).layout
    assert (layout.tp, layout.microbatch) == (4, 3)


def test_degrees_that_do_not_make_the_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="make 8 GPUs, not 6"):
        import_config("[parallelism]\ndata_parallel_shard_degree = 8\n", gpus=6)


def test_a_mistyped_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(InputError, match=r"did you mean parallelism\.tensor_parallel_degree"):
        import_config("[parallelism]\ntensor_paralel_degree = 8\n")


def test_text_that_is_not_toml_is_refused() -> None:
    with pytest.raises(InputError, match="not valid TOML"):
        import_config("[parallelism\n")


def test_an_unknown_flavor_is_said_and_the_layout_still_read() -> None:
    imported = import_config('[model]\nname = "llama4"\nflavor = "17bx16e"\n', gpus=1)
    assert imported.model is None
    assert "model.flavor" in {problem.where for problem in imported.unknown}
