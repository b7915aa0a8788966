"""`RolloutConfig`: how rollouts are drawn."""

import msgspec

from meshwright.spec.field_checks import FieldChecker


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are drawn."""

    seed: int = 0
    group_size: int = 8
    """Rollouts of each prompt."""
    max_tokens: int = 256
    """Drawn in one turn."""
    max_turns: int = 1
    temperature: float = 1.0
    """1, or 0 for evaluation. Log-probabilities that the engine tells are the model's own: at any
    other temperature tokens would be drawn by chances that nobody told of."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn besides the model's own."""
    environment_timeout_s: float = 60.0
    """The deadline of one step of an environment."""
    threads: int = 4
    """In which environments that wait take their steps."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            threads=self.threads,
        )
        bounds.positive(environment_timeout_s=self.environment_timeout_s)
        if self.temperature not in (0.0, 1.0):
            what = f"{self.temperature:g} draws by other chances than the engine tells"
            bounds.add("temperature", what, "use 1 for training, 0 for evaluation")
        bounds.raise_problems()

    def samples_like(self, other: "RolloutConfig") -> bool:
        """Tell whether both draw the same: deadlines and threads change no token."""
        alike = msgspec.structs.replace(
            other, environment_timeout_s=self.environment_timeout_s, threads=self.threads
        )
        return self == alike
