"""Which settings of a run have nothing to do, lest somebody waits for what they would."""

from collections.abc import Iterator

from meshwright.run.posttrain.loop.objective import CriticSettings, ObjectiveSettings
from meshwright.run.posttrain.loop.settings import LoopSettings


def idle_settings(settings: LoopSettings) -> Iterator[str]:
    """Say of each that was changed and changes nothing why that is so."""
    aim, usual = settings.objective, ObjectiveSettings()
    if settings.critic != CriticSettings() and aim.advantage != "gae":
        yield "critic has nothing to do: only objective.advantage = gae has one"
    if aim.discount != usual.discount and aim.advantage not in ("whitened", "gae"):
        yield f"objective.discount has nothing to do: {aim.advantage} looks at whole answers"
    if aim.loss == "reinforce" and (aim.low, aim.high) != (None, None):
        yield "objective.low and high have nothing to do: reinforce has no ratio to bound"
    about = (aim.correction_most, aim.correction_span)
    if aim.correction == "none" and about != (usual.correction_most, usual.correction_span):
        yield "correction_most and correction_span have nothing to do: objective.correction is none"
    pulled = (aim.kl_in, aim.kl_form, aim.kl_weighted)
    if aim.kl == 0 and pulled != (usual.kl_in, usual.kl_form, usual.kl_weighted):
        yield "kl_in, kl_form and kl_weighted have nothing to do: objective.kl is 0"
    if settings.graph_tokens != settings.limits.graph_tokens:
        yield f"graph_tokens has nothing to do: a {settings.placement} engine wakes in every step"
    if settings.replay and (settings.evaluate.prompts or settings.workers.count):
        yield "evaluate and workers have nothing to do: a replay has no engine"
