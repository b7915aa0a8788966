"""`Keeping`: the folder of a run, from which it goes on after any death with nothing lost or twice.

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
from meshwright.policy.rollout.controller import Progress
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.loop.frozen_weights import base_fingerprint
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.spans import Spans
from meshwright.run.posttrain.rollouts.log import Origin, RolloutLog, origin_in
from meshwright.run.posttrain.rollouts.record import Key, Rollout
from meshwright.run.train.checkpoint import Checkpoints, CheckpointSettings
from meshwright.run.train.checkpoint.folder import read_record
from meshwright.run.train.checkpoint.record import decode_extra
from meshwright.run.train.outputs.jsonl import JsonLines, cut, read
from meshwright.run.train.outputs.output import Output
from meshwright.run.train.outputs.progress import open_progress
from meshwright.run.train.outputs.settings import OutputSettings
from meshwright.run.train.paths import whole_path
from meshwright.run.train.placed_state import State
from meshwright.run.train.run_folder import claimed
from meshwright.run.train.run_state import other_config, other_kind

Say = Callable[[str], object]
ROLLOUTS, ADAPTER = "rollouts.jsonl", "adapter"
MAY_CHANGE = frozenset(
    {
        "folder", "threads", "microbatch_tokens", "batch_requests", "graphs", "graph_tokens",
        "verifier_workers", "verifier", "environment_s", "workers", "most_unjudged", "evaluate",
        "checkpoint_steps", "stall_s", "layout",
    }
)  # fmt: skip
"""Settings that may be others in every sitting of a run."""


class _Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors."""

    progress: Progress
    settings: dict[str, Any]
    base: str = ""
    """Fingerprint of the weights beside an adapter; empty in runs from before it was kept."""


class Keeping:
    """What a run has on disk; without a folder it keeps nothing."""

    def __init__(self, settings: LoopSettings, say: Say, *, asks: str = "") -> None:
        """Open or begin a folder; another process that has it is refused.

        `asks` is the environment that prompts are of, which has to be that of earlier sittings.
        """
        self._settings, self._say = settings, say
        self._shown: Output | None = None
        self._open = ExitStack()
        self.folder = Path(settings.folder) if settings.folder else None
        self.spans, self.rows = Spans(), list[dict[str, float]]()
        self.notes: list[str] = []
        self.log: RolloutLog | None = None
        self._checkpoints: Checkpoints | None = None
        self._metrics: JsonLines | None = None
        self.told = 0
        """Steps that were trained on before this sitting, as far as their figures tell."""
        self._saved_at: int | None = None
        self._trained = 0
        self._base = ""
        if self.folder is None:
            return
        try:
            self._open.enter_context(claimed(self.folder))
            self._checkpoints = checkpoints_of(settings)
            self._open.callback(self.part)
            self._base = base_fingerprint(settings)
            # Before anything there is written over.
            self._require_same(self.folder)
            _require_asked(self.folder, asks)
            self._write_config(self.folder)
            self.spans = self._timeline(self.folder)
            self._open.callback(self.spans.close)
        except BaseException:
            self._open.close()
            raise

    def join(self, mesh: Mesh) -> None:
        """Save and load with other ranks from here on; all of them do so at this point."""
        self.part()
        self._checkpoints = checkpoints_of(self._settings, mesh)

    def part(self) -> None:
        """Save and load no more; ranks do so together."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    @property
    def goes_on(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._checkpoints is not None and self._checkpoints.latest() is not None

    def resume(self, tensors: Mapping[str, State]) -> Progress | None:
        """Load the last checkpoint into tensors, and return where it stood; None begins anew."""
        if self.folder is None or self._checkpoints is None:
            return None
        progress, trained = None, None
        if self.goes_on:
            loaded = self._checkpoints.load(tensors)
            saved = msgspec.convert(loaded.extra, _Saved)
            progress, trained = saved.progress, loaded.step
            self._saved_at = self._trained = trained
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and not self._settings.rollout_only:
            self.told = max((row["step"] for row in read(metrics)), default=0)
        for name in ("metrics.jsonl", "transcripts.jsonl"):
            cut(self.folder / name, -1 if trained is None else trained)
        notes = self.folder / "notes.jsonl"
        if trained is None:
            cut(notes, -1)
        else:
            # What was not said of a step is not said again with it.
            cut(notes, trained, lambda row: not row.get("of_step"))
            ended = trained >= self._settings.steps
            did = "was finished before, and nothing is trained" if ended else "goes on"
            self.note(f"{did} after step {trained}")
        self._metrics = JsonLines(metrics, trained or 0)
        self._open.callback(self._metrics.close)
        return progress

    def open_log(self, origin: Origin, progress: Progress) -> Progress:
        """Open the rollouts, and return what to go on from.

        An asynchronous run drops all that `progress` does not know of, and asks groups again that
        were not judged whole.
        """
        if self.folder is None:
            return progress
        path = self.folder / ROLLOUTS
        self.log = self._open.enter_context(RolloutLog(path, origin, other_verifiers=True))
        if self.log.changed:
            what = f"{', '.join(self.log.changed)}: not as in the sittings before"
            self.note(f"{what}: verdicts from here on are of another verifier")
        if not self._settings.overlaps:
            return progress
        progress = self._whole_groups(self.log, progress)
        asked = set(progress.again)
        self.log.keep(lambda key: key.prompt < progress.unasked and key.prompt not in asked)
        return progress

    def _whole_groups(self, log: RolloutLog, progress: Progress) -> Progress:
        """Return a progress whose ready groups all are judged; the others are asked again."""

        def stands(key: Key) -> bool:
            # A later sitting may have begun to ask it anew, by weights that are gone.
            found = log.read(key) if key in log.keys else None
            return (
                found is not None
                and found.is_judged
                and all(version <= progress.trained for version in found.versions)
            )

        failed = {
            group
            for group, _ in progress.ready
            if not all(map(stands, keys_of(self._settings, group)))
        }
        ready = tuple(each for each in progress.ready if each[0] not in failed)
        again = tuple(sorted({*progress.again, *failed}))
        return msgspec.structs.replace(progress, ready=ready, again=again)

    def due(self, trained: int) -> bool:
        """Tell whether a checkpoint is written after so many steps."""
        every = self._settings.checkpoint_steps
        return trained in (0, self._settings.steps) or (every is not None and not trained % every)

    def lacks(self, trained: int) -> bool:
        """Tell whether there is a folder without a checkpoint after so many steps."""
        return self._checkpoints is not None and self._saved_at != trained

    def save(self, tensors: Mapping[str, State], progress: Progress) -> None:
        """Write a checkpoint; the run goes on from it until the next is there."""
        if self._checkpoints is None or not self.lacks(progress.trained):
            return
        saved = _Saved(progress=progress, settings=_kept(self._settings), base=self._base)
        self._checkpoints.save(progress.trained, tensors, msgspec.to_builtins(saved))
        self._saved_at = progress.trained
        self.spans.flush()

    def record(self, rollout: Rollout) -> None:
        """Write a rollout down."""
        if self.log is not None:
            self.log.add(rollout)

    def show(self, trained: int) -> None:
        """Tell the steps from now on on stderr, now and then."""
        lines = OutputSettings(progress="lines")
        self._shown = open_progress(lines, self._settings.steps, trained)

    def row(self, trained: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step down."""
        self._trained = trained
        self.rows.append({"step": float(trained), **figures})
        if self._shown is not None:
            self._shown.write(trained, figures)
        if self._metrics is not None:
            self._metrics.write(trained, figures)

    def note(self, text: str, step: int | None = None) -> None:
        """Say a sentence, and write it down: of a step, or after those that are trained."""
        self.notes.append(text)
        self._say(text)
        of_step = {} if step is None else {"of_step": True}
        said = {"step": self._trained if step is None else step, "text": text, **of_step}
        self._append("notes.jsonl", [said])

    def note_warm_up(self, losses: Sequence[float]) -> None:
        """Say what steps on right answers came to, where there were any."""
        if losses:
            said = f"warm-up: {len(losses)} steps on right answers, loss "
            self.note(f"{said}{losses[0]:.3f} to {losses[-1]:.3f}")

    def note_silence(self, step: int, figures: Mapping[str, float], sentence: str) -> None:
        """Say of a step, counted from 0, where none of its groups carries a signal."""
        silent = figures["silent_groups"] == figures["groups"]
        if silent and self._settings.objective.compares:
            self.note(f"step {step + 1}: {sentence}", step + 1)

    def transcripts(self, trained: int, shown: Sequence[dict[str, Any]]) -> None:
        """Write answers to held-out prompts down, in place of those after as many steps."""
        if self.folder is not None:
            cut(self.folder / "transcripts.jsonl", trained - 1)
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
        newest = None if self._checkpoints is None else self._checkpoints.latest()
        if newest is None:
            if (problem := other_config("grpo", folder)) is not None:
                raise InputError([problem])
            return
        extra = decode_extra(read_record(newest.path))
        if (problem := other_kind("grpo", extra, folder, "")) is not None:
            raise InputError([problem])
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
        from meshwright.spec.files import dump  # what writes TOML may be missing on a GPU machine

        new = folder / f".config.toml.{os.getpid()}"
        new.write_text(dump(_found(self._settings)), encoding="utf-8")
        new.replace(folder / "config.toml")

    @staticmethod
    def _timeline(folder: Path) -> Spans:
        from meshwright.timeline import TimelineWriter

        return Spans(TimelineWriter(folder / "timeline", rank=0))


def _require_asked(folder: Path, asks: str) -> None:
    """Refuse to go on with other prompts, or other right answers, than a run began with."""
    before = origin_in(folder / ROLLOUTS)
    if before is not None and asks and before.environment != asks:
        what = f"asks {asks!r}, and the run in {folder} asked {before.environment!r}"
        fix = "put its prompts and answers back, or give this run a folder of its own"
        raise InputError([Problem("task", what, fix)])


def checkpoints_of(settings: LoopSettings, mesh: Mesh | None = None) -> Checkpoints | None:
    """Return the checkpoints of a run; None without a folder. Ranks of a mesh share them."""
    if not settings.folder:
        return None
    kept = CheckpointSettings(every_steps=None, asynchronous=False)
    return Checkpoints(Path(settings.folder) / "checkpoints", kept, mesh=mesh)


def _kept(settings: LoopSettings) -> dict[str, Any]:
    """Return what may not change between the sittings of a run."""
    # As a file has it: there tuples are lists.
    every: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_found(settings)))
    return _whole({name: value for name, value in every.items() if name not in MAY_CHANGE})


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of settings, with what was not known when it was written."""
    try:
        return _kept(msgspec.convert(saved, LoopSettings))
    except (msgspec.ValidationError, InputError):
        return _whole(saved)  # of a version that knew what is gone: whatever differs is told


def _found(settings: LoopSettings) -> LoopSettings:
    """Return settings whose files are found from any folder."""
    model, task = whole_path(settings.model), settings.task.found()
    return msgspec.structs.replace(settings, model=model, task=task)


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose model is found from any folder."""
    return {**settings, "model": whole_path(settings["model"])}


def keys_of(settings: LoopSettings, group: int) -> list[Key]:
    """Return the keys of a group: prompts are numbered through all steps."""
    step = group // settings.prompts
    return [Key(step, group, sample) for sample in range(settings.samples)]
