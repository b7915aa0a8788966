"""Which settings of a run have nothing to do, lest somebody waits for what they would."""

from collections.abc import Iterator

from meshwright.run.posttrain.rl.config.objective_config import CriticConfig, ObjectiveConfig
from meshwright.run.posttrain.rl.config.rl_config import RLConfig


def find_unused_fields(settings: RLConfig) -> Iterator[str]:
    """Say of each that was changed and changes nothing why that is so."""
    aim, usual = settings.objective, ObjectiveConfig()
    if settings.critic != CriticConfig() and aim.adv_estimator != "gae":
        yield "critic has nothing to do: only objective.adv_estimator = gae has one"
    if aim.gamma != usual.gamma and aim.adv_estimator not in ("whitened", "gae"):
        yield f"objective.gamma has nothing to do: {aim.adv_estimator} looks at whole answers"
    if aim.loss == "reinforce" and (aim.clip_ratio_low, aim.clip_ratio_high) != (None, None):
        yield (
            "objective.clip_ratio_low and clip_ratio_high have nothing to do: "
            "reinforce has no ratio to bound"
        )
    about = (aim.correction_cap, aim.correction_level)
    if aim.importance_correction == "none" and about != (
        usual.correction_cap,
        usual.correction_level,
    ):
        yield (
            "correction_cap and correction_level have nothing to do: importance_correction is none"
        )
    pulled = (aim.kl_in, aim.kl_estimator, aim.kl_weighted)
    if aim.kl_coef == 0 and pulled != (usual.kl_in, usual.kl_estimator, usual.kl_weighted):
        yield "kl_in, kl_estimator and kl_weighted have nothing to do: objective.kl_coef is 0"
    if settings.max_cudagraph_capture_size != settings.scheduler_config.max_cudagraph_capture_size:
        yield (
            "max_cudagraph_capture_size has nothing to do: "
            f"a {settings.placement} engine wakes in every step"
        )
    if settings.replay and (settings.evaluate.num_prompts or settings.workers.num_workers):
        yield "evaluate and workers have nothing to do: a replay has no engine"
