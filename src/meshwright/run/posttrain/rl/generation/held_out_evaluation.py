"""`HeldOutEvaluation`: held-out prompts, answered by the engine; they take no part in training."""

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rl.config.rl_config import RLEvaluationConfig
from meshwright.run.posttrain.rl.generation.rollout_backend import (
    RolloutBackend,
    VerifierFailureMonitor,
)
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey, average_reward_components


class HeldOutEvaluation:
    """Answers held-out prompts when that is due."""

    def __init__(
        self,
        settings: RLEvaluationConfig,
        sampling: RolloutBackend | None,
        keeping: RLRunState,
        words: Any,
        *,
        max_pending_rewards: int,
        shares: bool = True,
    ) -> None:
        """Evaluate with an engine, or not at all; `words` makes text of tokens where it can.

        With more than `max_pending_rewards` failed verdicts of one evaluation the run ends. Rewards
        are told as shares of 1 where they are `shares`.
        """
        self._shares = shares
        self._settings, self._sampling, self._keeping = settings, sampling, keeping
        self._words = words
        # They are asked after any step, and are of none.
        name: Callable[[RolloutKey], str] = lambda key: f"held out, prompt {key.prompt}"  # noqa: E731
        self._watching = VerifierFailureMonitor(max_pending_rewards, keeping.write_note, name)
        self.metrics: dict[int, dict[str, float]] = {}
        """What was found, by steps trained."""
        self._drawn: Sequence[Rollout] = ()
        """The last sampled completions, as many as are written down."""

    def run_if_due(self, trained: int) -> dict[str, float]:
        """Return the figures after so many steps, where an evaluation is due amid them."""
        every = self._settings.every_steps
        if every is None or trained % every:
            return {}
        if self._sampling is not None:
            self._sampling.prepare_weights(trained)  # it may have them already
        return self.run_sampled(trained)

    def run_sampled(self, trained: int) -> dict[str, float]:
        """Sample completions of the prompts, as in training."""
        if self._sampling is None or not self._settings.num_prompts:
            return {}
        answers = self._answers(self._sampling, greedy=False)
        parts = {f"eval_{name}": mean for name, mean in average_reward_components(answers).items()}
        found = {"eval_reward": _mean(answers), **parts}
        self.metrics.setdefault(trained, {}).update(found)
        self._drawn = answers[: self._settings.transcripts]
        return found

    def run_full(self, trained: int) -> None:
        """Generate sampled and greedy completions, and write some of them down."""
        if self._sampling is None or not self._settings.num_prompts:
            return
        figures = self.run_sampled(trained)
        greedy = self._answers(self._sampling, greedy=True)
        figures["eval_greedy_reward"] = _mean(greedy)
        self.metrics[trained].update(figures)
        self._keeping.write_transcripts(trained, [*map(self._shown, greedy, self._drawn)])
        self._keeping.write_note(
            f"step {trained} held-out reward: {self._told(figures['eval_reward'])} sampled, "
            f"{self._told(figures['eval_greedy_reward'])} greedy",
            trained,
        )

    def _told(self, reward: float) -> str:
        """Return a mean reward as a share of right answers, where it can be one."""
        return f"{reward:.1%}" if self._shares and 0 <= reward <= 1 else f"{reward:.4g}"

    def _answers(self, sampling: RolloutBackend, *, greedy: bool) -> Sequence[Rollout]:
        self._watching.start_step()
        return sampling.evaluate_held_out(
            self._settings.num_prompts, greedy=greedy, hear=self._watching.observe
        )

    def _shown(self, likeliest: Rollout, drawn: Rollout) -> dict[str, Any]:
        """Return two completions of one prompt: the greedy one, and a sampled one."""
        text = tuple if self._words is None else self._words.text
        said, tried = (
            text([token for turn in each.turns for token in turn.tokens])
            for each in (likeliest, drawn)
        )
        return {
            "prompt": text(likeliest.prompt),
            "answer": said,
            "reward": likeliest.reward,
            "sampled_completion": tried,
            "sampled_reward": drawn.reward,
        }


def _mean(rollouts: Sequence[Rollout]) -> float:
    """Return the mean reward of answers that were judged: the others have none, not 0."""
    rewards = [each.reward for each in rollouts if each.has_reward]
    if not rewards:
        what = f"none of {len(rollouts)} held-out answers was judged"
        raise InputError([Problem("verifiers", what, "look at the reasons in the run's notes")])
    return sum(rewards) / len(rewards)
