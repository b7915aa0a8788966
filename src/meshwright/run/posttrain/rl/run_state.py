"""`RLRunState`: the folder of a run, from which it resumes with no rollout lost or repeated.

config.toml       the settings
checkpoints/      weights, the optimizer's state, and which prompts are trained, ready or open
rollouts.jsonl    every rollout, written before it is trained on
metrics.jsonl     a row of figures for each step
notes.jsonl       sentences: steps without a signal, verifiers that failed; after how many steps
transcripts.jsonl answers to the same held-out prompts before and after
adapter/          what was trained beside a model's weights, as PEFT has it, when the run has ended
timeline/         what trainer and engines did and waited for

A checkpoint stands for its step. What was drawn after it is found in the log: a synchronous run
trains on it again, bit by bit the same, and judges again what was not judged of a step that it had
not come to train on; an asynchronous one drops it, as the weights that drew it are gone, and asks
those prompts anew, with those of which a verdict failed.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout.controller import RolloutProgress
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.rl.checkpoint_fingerprint import compute_base_fingerprint
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.timeline_recorder import RLTimelineRecorder
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey
from meshwright.run.posttrain.rollout.rollout_log import RolloutLog, RolloutOrigin, read_origin
from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager
from meshwright.run.train.checkpoint.checkpoint_folder import read_metadata
from meshwright.run.train.checkpoint.metadata import decode_extra
from meshwright.run.train.logging.jsonl import JsonlLogger, read_rows, truncate_after_step
from meshwright.run.train.logging.logger import MetricLogger
from meshwright.run.train.logging.logging_config import LoggingConfig
from meshwright.run.train.logging.progress import open_progress
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.run.train.run_folder.run_folder import lock_run_folder
from meshwright.run.train.run_folder.run_state import (
    find_config_kind_problem,
    find_run_kind_problem,
)
from meshwright.run.train.run_folder.state_tensors import StateTensor

LogFunction = Callable[[str], object]
ROLLOUTS, ADAPTER = "rollouts.jsonl", "adapter"
RESUMABLE_CHANGES = frozenset(
    {
        "folder", "threads", "microbatch_tokens", "max_num_seqs", "cuda_graphs",
        "max_cudagraph_capture_size", "verifier_workers", "verifier", "environment_timeout_s",
        "workers", "max_pending_rewards", "evaluate", "checkpoint_every_steps", "stall_timeout_s",
        "layout",
    }
)  # fmt: skip
"""Settings that may be others in every session of a run."""
RL_RUN_STATE_VERSION = 2
"""Goes up with every change of what a checkpoint holds beside tensors."""


class _Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors."""

    version: int = RL_RUN_STATE_VERSION
    progress: RolloutProgress
    settings: dict[str, Any]
    base: str = ""
    """Fingerprint of the weights beside an adapter; empty in runs from before it was kept."""


class RLRunState:
    """What a run has on disk; without a folder it keeps nothing."""

    def __init__(self, settings: RLConfig, say: LogFunction, *, asks: str = "") -> None:
        """Open or begin a folder; another process that has it is refused.

        `asks` is the environment that prompts are of, which has to be that of earlier sessions.
        """
        self._settings, self._say = settings, say
        self._shown: MetricLogger | None = None
        self._open = ExitStack()
        self.folder = Path(settings.folder) if settings.folder else None
        self.timeline, self.step_metrics = RLTimelineRecorder(), list[dict[str, float]]()
        self.notes: list[str] = []
        self.rollout_log: RolloutLog | None = None
        self._checkpoints: CheckpointManager | None = None
        self._metrics: JsonlLogger | None = None
        self.reported_step = 0
        """Steps that were trained on before this session, as far as their figures tell."""
        self._saved_at: int | None = None
        self._trained = 0
        self._base = ""
        if self.folder is None:
            return
        try:
            self._open.enter_context(lock_run_folder(self.folder))
            self._checkpoints = open_checkpoints(settings)
            self._open.callback(self.detach_mesh)
            self._base = compute_base_fingerprint(settings)
            # Before anything there is written over.
            self._require_same(self.folder)
            _require_asked(self.folder, asks)
            self._write_config(self.folder)
            self.timeline = self._timeline(self.folder)
            self._open.callback(self.timeline.close)
        except BaseException:
            self._open.close()
            raise

    def attach_mesh(self, mesh: Mesh) -> None:
        """Save and load with other ranks from here on; all of them do so at this point."""
        self.detach_mesh()
        self._checkpoints = open_checkpoints(self._settings, mesh)

    def detach_mesh(self) -> None:
        """Save and load no more; ranks do so together."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._checkpoints is not None and self._checkpoints.find_latest() is not None

    def resume(self, tensors: Mapping[str, StateTensor]) -> RolloutProgress | None:
        """Load the last checkpoint into tensors, and return where it stood; None begins anew."""
        if self.folder is None or self._checkpoints is None:
            return None
        progress, trained = None, None
        if self.has_checkpoint:
            loaded = self._checkpoints.load(tensors)
            saved = msgspec.convert(loaded.extra, _Saved)
            progress, trained = saved.progress, loaded.step
            self._saved_at = self._trained = trained
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and not self._settings.rollout_only:
            self.reported_step = max((row["step"] for row in read_rows(metrics)), default=0)
        for name in ("metrics.jsonl", "transcripts.jsonl"):
            truncate_after_step(self.folder / name, -1 if trained is None else trained)
        notes = self.folder / "notes.jsonl"
        if trained is None:
            truncate_after_step(notes, -1)
        else:
            # What was not said of a step is not said again with it.
            truncate_after_step(notes, trained, lambda row: not row.get("is_step_note"))
            ended = trained >= self._settings.steps
            did = "was finished before, and nothing is trained" if ended else "goes on"
            self.write_note(f"{did} after step {trained}")
        self._metrics = JsonlLogger(metrics, trained or 0)
        self._open.callback(self._metrics.close)
        return progress

    def open_log(self, origin: RolloutOrigin, progress: RolloutProgress) -> RolloutProgress:
        """Open the rollouts, and return what to go on from.

        An asynchronous run drops all that `progress` does not know of, and asks groups again that
        were not judged whole.
        """
        if self.folder is None:
            return progress
        path = self.folder / ROLLOUTS
        self.rollout_log = self._open.enter_context(RolloutLog(path, origin, other_verifiers=True))
        if self.rollout_log.changed_verifiers:
            what = (
                f"{', '.join(self.rollout_log.changed_verifiers)}: not as in earlier run sessions"
            )
            self.write_note(f"{what}: verdicts from here on are of another verifier")
        if not self._settings.overlaps:
            return progress
        progress = self._whole_groups(self.rollout_log, progress)
        asked = set(progress.requeued_groups)
        self.rollout_log.retain(
            lambda key: key.prompt < progress.next_group and key.prompt not in asked
        )
        return progress

    def _whole_groups(self, log: RolloutLog, progress: RolloutProgress) -> RolloutProgress:
        """Return a progress whose ready groups all are judged; the others are asked again."""

        def stands(key: RolloutKey) -> bool:
            # A later session may have begun to ask it anew, by weights that are gone.
            found = log.read(key) if key in log.keys else None
            return (
                found is not None
                and found.has_reward
                and all(version <= progress.trained_steps for version in found.versions)
            )

        failed = {
            group
            for group, _ in progress.ready_groups
            if not all(map(stands, build_group_keys(self._settings, group)))
        }
        ready = tuple(each for each in progress.ready_groups if each[0] not in failed)
        again = tuple(sorted({*progress.requeued_groups, *failed}))
        return msgspec.structs.replace(progress, ready_groups=ready, requeued_groups=again)

    def is_checkpoint_due(self, trained: int) -> bool:
        """Tell whether a checkpoint is written after so many steps."""
        every = self._settings.checkpoint_every_steps
        return trained in (0, self._settings.steps) or (every is not None and not trained % every)

    def needs_first_checkpoint(self, trained: int) -> bool:
        """Tell whether there is a folder without a checkpoint after so many steps."""
        return self._checkpoints is not None and self._saved_at != trained

    def save(self, tensors: Mapping[str, StateTensor], progress: RolloutProgress) -> None:
        """Write a checkpoint; the run goes on from it until the next is there."""
        if self._checkpoints is None or not self.needs_first_checkpoint(progress.trained_steps):
            return
        saved = _Saved(progress=progress, settings=_kept(self._settings), base=self._base)
        self._checkpoints.save(progress.trained_steps, tensors, msgspec.to_builtins(saved))
        self._saved_at = progress.trained_steps
        self.timeline.flush()

    def log_rollout(self, rollout: Rollout) -> None:
        """Write a rollout down."""
        if self.rollout_log is not None:
            self.rollout_log.add(rollout)

    def set_report_start(self, trained: int) -> None:
        """Tell the steps from now on on stderr, now and then."""
        lines = LoggingConfig(progress="lines")
        self._shown = open_progress(lines, self._settings.steps, trained)

    def write_metrics(self, trained: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a step down."""
        self._trained = trained
        self.step_metrics.append({"step": float(trained), **metrics})
        if self._shown is not None:
            self._shown.write(trained, metrics)
        if self._metrics is not None:
            self._metrics.write(trained, metrics)

    def write_note(self, text: str, step: int | None = None) -> None:
        """Say a sentence, and write it down: of a step, or after those that are trained."""
        self.notes.append(text)
        self._say(text)
        of_step = {} if step is None else {"is_step_note": True}
        said = {"step": self._trained if step is None else step, "text": text, **of_step}
        self._append("notes.jsonl", [said])

    def note_warmup(self, losses: Sequence[float]) -> None:
        """Say what steps on right answers came to, where there were any."""
        if losses:
            said = f"warm-up: {len(losses)} steps on right answers, loss "
            self.write_note(f"{said}{losses[0]:.3f} to {losses[-1]:.3f}")

    def note_without_signal(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        """Say of a step, counted from 0, where none of its groups carries a signal."""
        silent = metrics["groups_without_signal"] == metrics["groups"]
        if silent and self._settings.objective.is_group_relative:
            self.write_note(f"step {step + 1}: {sentence}", step + 1)

    def write_transcripts(self, trained: int, shown: Sequence[dict[str, Any]]) -> None:
        """Write answers to held-out prompts down, in place of those after as many steps."""
        if self.folder is not None:
            truncate_after_step(self.folder / "transcripts.jsonl", trained - 1)
        self._append("transcripts.jsonl", [{"step": trained, **each} for each in shown])

    def close(self) -> None:
        """Close everything."""
        if self._shown is not None:
            self._shown.close()
        self._open.close()

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        if self.folder is not None:
            with (self.folder / name).open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _require_same(self, folder: Path) -> None:
        """Refuse a folder with another run."""
        newest = None if self._checkpoints is None else self._checkpoints.find_latest()
        if newest is None:
            if (problem := find_config_kind_problem("grpo", folder)) is not None:
                raise InputError([problem])
            return
        extra = decode_extra(read_metadata(newest.path))
        if (problem := find_run_kind_problem("grpo", extra, folder, "")) is not None:
            raise InputError([problem])
        version = extra.get("version", 1)  # the first version has no such field
        if version != RL_RUN_STATE_VERSION:
            what = f"its state has version {version}, and this release reads {RL_RUN_STATE_VERSION}"
            fix = "resume with the release that saved it, or give this run a folder of its own"
            raise InputError([Problem(str(folder), what, fix)])
        saved = msgspec.convert(extra, _Saved)
        now, before = _kept(self._settings), _completed(saved.settings)
        changed = [name for name in now | before if now.get(name) != before.get(name)]
        if "steps" in changed and now["steps"] > before["steps"]:
            # A run may be made longer; its learning rates follow the new length from here on.
            changed.remove("steps")
        if changed:
            what = f"{', '.join(sorted(changed))} differ from the run in {folder}"
            fix = "change them back, or give this run a folder of its own"
            raise InputError([Problem("settings", what, fix)])
        if saved.base and saved.base != self._base:
            model = self._settings.model
            what = f"{model} holds other weights than the adapter in {folder} was trained beside"
            fix = "put its weights back, or give this run a folder of its own"
            raise InputError([Problem("model", what, fix)])

    def _write_config(self, folder: Path) -> None:
        from meshwright.spec.file_formats import (
            dump,  # what writes TOML may be missing on a GPU machine
        )

        new = folder / f".config.toml.{os.getpid()}"
        new.write_text(dump(_found(self._settings)), encoding="utf-8")
        new.replace(folder / "config.toml")

    @staticmethod
    def _timeline(folder: Path) -> RLTimelineRecorder:
        from meshwright.timeline import TimelineWriter

        return RLTimelineRecorder(TimelineWriter(folder / "timeline", rank=0))


def _require_asked(folder: Path, asks: str) -> None:
    """Refuse to go on with other prompts, or other right answers, than a run began with."""
    before = read_origin(folder / ROLLOUTS)
    if before is not None and asks and before.environment != asks:
        what = f"asks {asks!r}, and the run in {folder} asked {before.environment!r}"
        fix = "put its prompts and answers back, or give this run a folder of its own"
        raise InputError([Problem("task", what, fix)])


def open_checkpoints(settings: RLConfig, mesh: Mesh | None = None) -> CheckpointManager | None:
    """Return the checkpoints of a run; None without a folder. Ranks of a mesh share them."""
    if not settings.folder:
        return None
    kept = CheckpointConfig(every_steps=None, async_save=False)
    return CheckpointManager(Path(settings.folder) / "checkpoints", kept, mesh=mesh)


def _kept(settings: RLConfig) -> dict[str, Any]:
    """Return what may not change between the sessions of a run."""
    # As a file has it: there tuples are lists.
    every: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_found(settings)))
    return _whole({name: value for name, value in every.items() if name not in RESUMABLE_CHANGES})


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of settings, with what was not known when it was written."""
    try:
        return _kept(msgspec.convert(saved, RLConfig))
    except (msgspec.ValidationError, InputError):
        return _whole(saved)  # of a version that knew what is gone: whatever differs is told


def _found(settings: RLConfig) -> RLConfig:
    """Return settings whose files are found from any folder."""
    model, task = make_absolute_path(settings.model), settings.task.resolve_paths()
    return msgspec.structs.replace(settings, model=model, task=task)


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose model is found from any folder."""
    return {**settings, "model": make_absolute_path(settings["model"])}


def build_group_keys(settings: RLConfig, group: int) -> list[RolloutKey]:
    """Return the keys of a group: prompts are numbered through all steps."""
    step = group // settings.prompts_per_step
    return [RolloutKey(step, group, sample) for sample in range(settings.group_size)]
