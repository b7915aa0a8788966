"""How likely drawn tokens were, from lines of a step to the answers that asked."""

from collections.abc import Sequence

from meshwright.run.serve.asked import TokenLogprob
from meshwright.run.serve.sampling.lines import Lines
from meshwright.run.serve.sampling.telling import Told


def likelihoods(
    asked: Sequence[int | None], lines: Lines, tokens: Sequence[tuple[int, ...]], told: Told
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return how likely the tokens of rows were, by place of those who asked.

    Args:
        asked: How many of the likeliest each row wants beside its own tokens; None wants nothing.
        lines: Those of the step.
        tokens: What each row drew.
        told: What the sampler says of the lines.
    """
    own, top, top_tokens = (part.tolist() for part in told)
    at = {line: number for number, line in enumerate(lines.told)}
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    begin = 0
    for place, count in enumerate(asked):
        if count is not None:
            numbers = [at[begin + offset] for offset in range(len(tokens[place]))]
            found[place] = tuple(
                TokenLogprob(
                    token,
                    own[number],
                    tuple(zip(top_tokens[number][:count], top[number][:count], strict=True)),
                )
                for token, number in zip(tokens[place], numbers, strict=True)
            )
        begin = lines.ends[place]
    return found
