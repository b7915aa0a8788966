"""What `mw twin` tries where nothing is asked for: a small model, and two ranks in many ways."""

from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, decoder

LENGTH, SEQUENCES = 128, 8


def small_model() -> Model:
    """Return a model whose passes take tens of milliseconds on one core."""
    return decoder("twin", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=4096)


STANDARD = (
    Layout(pp=2, schedule="gpipe"),
    Layout(pp=2, schedule="1f1b"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="zb-h1"),
    Layout(pp=2, schedule="zb-v", virtual_stages=2),
    Layout(pp=2, schedule="dualpipe-v", virtual_stages=2),
    Layout(pp=2, schedule="1f1b", stage_layers=(5, 3)),
    Layout(pp=2, schedule="1f1b", recompute="full"),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(dp=2),
    Layout(dp=2, zero=1),
)
"""Two ranks each: every schedule that two stages can run, uneven stages, recompute, and every other
axis."""
