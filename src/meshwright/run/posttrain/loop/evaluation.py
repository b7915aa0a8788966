"""`Evaluation`: held-out prompts, answered by the engine; they take no part in training."""

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.sampling import Sampling, Watching
from meshwright.run.posttrain.loop.settings import EvaluateSettings
from meshwright.run.posttrain.rollouts.record import Key, Rollout, part_means


class Evaluation:
    """Answers held-out prompts when that is due."""

    def __init__(
        self,
        settings: EvaluateSettings,
        sampling: Sampling | None,
        keeping: Keeping,
        words: Any,
        *,
        most_unjudged: int,
        shares: bool = True,
    ) -> None:
        """Evaluate with an engine, or not at all; `words` makes text of tokens where it can.

        With more than `most_unjudged` failed verdicts of one evaluation the run ends. Rewards are
        told as shares of 1 where they are `shares`.
        """
        self._shares = shares
        self._settings, self._sampling, self._keeping = settings, sampling, keeping
        self._words = words
        # They are asked after any step, and are of none.
        name: Callable[[Key], str] = lambda key: f"held out, prompt {key.prompt}"  # noqa: E731
        self._watching = Watching(most_unjudged, keeping.note, name)
        self.figures: dict[int, dict[str, float]] = {}
        """What was found, by steps trained."""
        self._drawn: Sequence[Rollout] = ()
        """The last answers by chance, as many as are written down."""

    def due(self, trained: int) -> dict[str, float]:
        """Return the figures after so many steps, where an evaluation is due amid them."""
        every = self._settings.every_steps
        if every is None or trained % every:
            return {}
        if self._sampling is not None:
            self._sampling.ready(trained)  # it may have them already
        return self.sampled(trained)

    def sampled(self, trained: int) -> dict[str, float]:
        """Answer the prompts by chance, as in training."""
        if self._sampling is None or not self._settings.prompts:
            return {}
        answers = self._answers(self._sampling, greedy=False)
        parts = {f"held_out_{name}": mean for name, mean in part_means(answers).items()}
        found = {"held_out_reward": _mean(answers), **parts}
        self.figures.setdefault(trained, {}).update(found)
        self._drawn = answers[: self._settings.transcripts]
        return found

    def whole(self, trained: int) -> None:
        """Answer by chance and greedily, and write some answers down."""
        if self._sampling is None or not self._settings.prompts:
            return
        figures = self.sampled(trained)
        greedy = self._answers(self._sampling, greedy=True)
        figures["held_out_greedy_reward"] = _mean(greedy)
        self.figures[trained].update(figures)
        self._keeping.transcripts(trained, [*map(self._shown, greedy, self._drawn)])
        self._keeping.note(
            f"held out after {trained} steps: {self._told(figures['held_out_reward'])} by chance, "
            f"{self._told(figures['held_out_greedy_reward'])} greedily",
            trained,
        )

    def _told(self, reward: float) -> str:
        """Return a mean reward as a share of right answers, where it can be one."""
        return f"{reward:.1%}" if self._shares and 0 <= reward <= 1 else f"{reward:.4g}"

    def _answers(self, sampling: Sampling, *, greedy: bool) -> Sequence[Rollout]:
        self._watching.begin()
        return sampling.held_out(self._settings.prompts, greedy=greedy, hear=self._watching.hear)

    def _shown(self, likeliest: Rollout, drawn: Rollout) -> dict[str, Any]:
        """Return two answers to one prompt: the likeliest, and one by chance."""
        text = tuple if self._words is None else self._words.text
        said, tried = (
            text([token for turn in each.turns for token in turn.tokens])
            for each in (likeliest, drawn)
        )
        return {
            "prompt": text(likeliest.prompt),
            "answer": said,
            "reward": likeliest.reward,
            "drawn": tried,
            "drawn_reward": drawn.reward,
        }


def _mean(answers: Sequence[Rollout]) -> float:
    """Return the mean reward of answers that were judged: the others have none, not 0."""
    rewards = [each.reward for each in answers if each.is_judged]
    if not rewards:
        what = f"none of {len(answers)} held-out answers was judged"
        raise InputError([Problem("verifiers", what, "look at the reasons in the run's notes")])
    return sum(rewards) / len(rewards)
