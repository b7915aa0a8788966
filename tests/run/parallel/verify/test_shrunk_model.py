"""Every model of the catalog becomes small without becoming another kind of model."""

import pytest

pytest.importorskip("torch", reason="builds modules")

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.parallel.compatibility import find_verify_problems
from meshwright.run.parallel.verify.shrunk_model import shrink_model
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionSpec, MoESpec

PLAIN = Layout()
MOST_PARAMETERS = 600_000


@pytest.mark.parametrize("name", catalog.list_models())
def test_every_model_of_the_catalog_shrinks_and_builds(name: str) -> None:
    small = shrink_model(catalog.get_model(name), [PLAIN], sequence_length=32).model
    decoder = build_decoder(small)
    assert sum(each.numel() for each in decoder.parameters()) < MOST_PARAMETERS


@pytest.mark.parametrize("name", catalog.list_models())
def test_what_decides_how_a_model_is_computed_stays(name: str) -> None:
    model = catalog.get_model(name)
    small = shrink_model(model, [PLAIN], sequence_length=32).model
    assert set(small.layer_names) == set(model.layer_names)
    assert (small.tied, small.norm, small.positions) == (model.tied, model.norm, model.positions)
    for before, after in zip(model.blocks, small.blocks, strict=True):
        assert (before.name, before.norms) == (after.name, after.norms)
        assert type(before.mixer) is type(after.mixer)
        match before.mixer, after.mixer:
            case AttentionSpec() as old, AttentionSpec() as new:
                assert old.heads // old.kv_heads == new.heads // new.kv_heads
                assert (old.window is None, old.chunk is None) == (
                    new.window is None,
                    new.chunk is None,
                )
        match before.mlp, after.mlp:
            case MoESpec() as many, MoESpec() as few:
                assert (many.top_k, many.groups, many.groups_used) == (
                    few.top_k,
                    few.groups,
                    few.groups_used,
                )
                assert (many.shared_width > 0) == (few.shared_width > 0)
                assert few.count > few.top_k


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_what_fits_the_real_model_fits_the_small_one(name: str) -> None:
    model = catalog.get_model(name)
    layouts = [
        Layout(tp=4, sequence_parallel=True, dp=2),
        Layout(cp=2, cp_kind="ulysses", tp=2),
        Layout(dp=2, zero=1),
    ]
    for layout in layouts:
        assert find_verify_problems(model, layout, sequence_length=32, global_batch=8) == ()
    small = shrink_model(model, layouts, sequence_length=32)
    for layout in small.layouts:
        assert find_verify_problems(small.model, layout, sequence_length=32, global_batch=8) == ()


def test_key_heads_stay_fewer_than_ranks_where_they_were() -> None:
    model = catalog.get_model("llama3.1-70b")  # 8 key heads
    shared = shrink_model(model, [Layout(tp=8)], sequence_length=32).model.blocks[0].mixer
    assert isinstance(shared, AttentionSpec)
    assert shared.kv_heads == 8
    model = catalog.get_model("qwen2.5-0.5b")  # 2 key heads, 14 heads
    twins = shrink_model(model, [Layout(tp=2)], sequence_length=32).model.blocks[0].mixer
    assert isinstance(twins, AttentionSpec)
    assert (twins.heads, twins.kv_heads) == (14, 2)


def test_windows_end_within_the_sequence() -> None:
    small = shrink_model(catalog.get_model("gemma2-2b"), [PLAIN], sequence_length=32).model
    windows = {
        block.mixer.window for block in small.blocks if isinstance(block.mixer, AttentionSpec)
    }
    assert windows == {8, None}


def test_uneven_stages_stay_uneven() -> None:
    model = catalog.get_model("llama3.1-8b")  # 32 layers
    layout = Layout(pp=4, stage_layers=(5, 11, 11, 5))
    small = shrink_model(
        model, [layout, Layout(pp=2, schedule="zb-v", virtual_stages=2)], sequence_length=32
    )
    assert small.model.layers == 4
    assert small.layouts[0].stage_layers == (1, 1, 1, 1)
    layout = Layout(pp=2, stage_layers=(8, 24))
    small = shrink_model(model, [layout, Layout(pp=4)], sequence_length=32)
    assert small.layouts[0].stage_layers == (1, 3)


def test_all_that_is_smaller_is_listed() -> None:
    changes = shrink_model(
        catalog.get_model("mixtral-8x7b"), [Layout(dp=2, ep=2)], sequence_length=32
    ).changes
    assert {change.field: (change.original, change.reduced) for change in changes} == {
        "hidden": (4096, 64),
        "vocab": (32000, 251),
        "blocks.moe.mixer.heads": (32, 8),
        "blocks.moe.mixer.kv_heads": (8, 2),
        "blocks.moe.mixer.head_dim": (128, 16),
        "blocks.moe.mlp.count": (8, 4),
        "blocks.moe.mlp.width": (14336, 224),
        "pattern": ("32*moe", "2*moe"),
    }


def test_what_a_step_sets_itself_is_listed_too() -> None:
    layout = Layout(optimizer="muon", global_batch=64)
    changes = shrink_model(catalog.get_model("gpt2"), [layout], sequence_length=32).changes
    ours = {change.field: change.reduced for change in changes if change.field.startswith("layout")}
    assert ours == {"layout 1: optimizer": "adamw", "layout 1: global_batch": None}


@pytest.mark.parametrize("multiple", [16, 128])
def test_parts_of_products_are_multiples_where_fp8_asks_for_them(multiple: int) -> None:
    layouts = [Layout(tp=2)]
    for name in ("llama3.1-8b", "gemma2-2b", "gpt3-125m"):
        model = shrink_model(
            catalog.get_model(name), layouts, sequence_length=32, multiple=multiple
        ).model
        for path, parameter in build_decoder(model).layers.named_parameters():
            head = 64 if name == "gpt3-125m" else multiple  # its heads are no wider
            if parameter.dim() == 2 and "norm" not in path:
                assert parameter.shape[0] % min(multiple, head) == 0, path
                assert parameter.shape[1] % min(multiple, head) == 0, path
