"""`RolloutLog`: a file of rollouts that grows line by line, and that a killed run goes on with.

    with RolloutLog("rollouts.jsonl", origin) as log:
        for rollout in log.missing(generator, keys, version): ...

The first line says where the rollouts come from; each further one is a rollout with its verdicts. A
line is written whole or not at all: what a kill left unfinished is cut off when the file is opened
again, and drawn anew. A key that is there already is not drawn twice.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.posttrain.rollout.generator import RolloutGenerator
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey
from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
from meshwright.run.train.run_folder.paths import make_absolute_path

FORMAT_VERSION = "meshwright rollouts 2"


class RolloutOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rollouts come from; files of different origins are never mixed."""

    environment: str
    rollout_config: RolloutConfig
    fingerprints: dict[str, str] = {}
    """Of the verifiers' modules; each verdict has that of its own beside it."""
    model: str = ""
    """A name, or where it lies."""
    format: str = FORMAT_VERSION


def describe_origin(generator: RolloutGenerator, model: str = "") -> RolloutOrigin:
    """Return where the rollouts of a generator come from."""
    return RolloutOrigin(
        environment=generator.environment.name,
        rollout_config=generator.config,
        fingerprints=generator.reward_provider.fingerprints,
        model=model,
    )


class RolloutLog:
    """A file that rollouts are added to; one process writes it at a time."""

    def __init__(
        self, path: str | Path, origin: RolloutOrigin, *, other_verifiers: bool = False
    ) -> None:
        """Open a file or begin one; its origin has to be the same.

        With `other_verifiers` their modules may have changed: the file names the new ones from then
        on, and `changed_verifiers` those that were others before.
        """
        self.path, self.origin = Path(path), origin
        self._file = self.path.open("a+b", buffering=0)
        self._may_change = other_verifiers
        self.changed_verifiers = tuple[str, ...]()
        """Verifiers that are not those of earlier verdicts."""
        self.newest_version = -1
        """The newest weights that drew any rollout when it was opened; -1 where none did."""
        try:
            self._lock()
            self._size, self._known = 0, dict[RolloutKey, tuple[int, int]]()
            """Where the line of each rollout begins, and its bytes."""
            self._resume()
            if self.changed_verifiers:
                self._rewrite(map(self._line, self._known))
        except BaseException:
            self._file.close()
            raise

    @property
    def keys(self) -> KeysView[RolloutKey]:
        """The rollouts that are there."""
        return self._known.keys()

    def read(self, key: RolloutKey) -> Rollout:
        """Return a rollout that is there."""
        return msgspec.json.decode(self._line(key), type=Rollout)

    def add(self, rollout: Rollout) -> None:
        """Write a rollout down; it stays, whatever happens to this process."""
        if rollout.key in self._known:
            fix = "draw only what is missing"
            raise InputError([Problem(str(self.path), f"has {rollout.key.label} already", fix)])
        begin = self._size
        self._write(rollout)
        self._known[rollout.key] = begin, self._size - begin

    def generate_missing(
        self, generator: RolloutGenerator, keys: Sequence[RolloutKey], version: int
    ) -> Iterator[Rollout]:
        """Draw those of the keys that are not there, and write each down before it is returned."""
        wanted = [key for key in keys if key not in self._known]
        for rollout in generator.generate_rollouts(wanted, version):
            self.add(rollout)
            yield rollout

    def retain(self, wanted: Callable[[RolloutKey], bool]) -> None:
        """Drop all others, in one step: a crash leaves all or none of them."""
        left = [key for key in self._known if wanted(key)]
        if len(left) < len(self._known):
            self._rewrite(map(self._line, left))

    def replace(self, rollouts: Sequence[Rollout]) -> None:
        """Put rollouts in the places of those with the same keys, in one step."""
        fresh = {each.key: _encoded(each) for each in rollouts}
        if strange := [key for key in fresh if key not in self._known]:
            what, fix = f"has no {strange[0].label}", "add what is new"
            raise InputError([Problem(str(self.path), what, fix)])
        self._rewrite(fresh.get(key) or self._line(key) for key in self._known)

    def close(self) -> None:
        """Close the file, which others may write from then on."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what = "another process writes rollouts there"
            raise InputError([Problem(str(self.path), what, "end it, or use another")]) from error

    def _line(self, key: RolloutKey) -> bytes:
        begin, count = self._known[key]
        return os.pread(self._file.fileno(), count, begin)

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Write the file anew; a crash leaves the old one or the new one."""
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with beside.open("wb") as whole:
            whole.write(_encoded(self.origin))
            whole.writelines(lines)
        fresh = beside.open("a+b", buffering=0)
        # The new file is locked before it has the old one's name: nobody writes in between.
        fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        beside.replace(self.path)
        self._file.close()
        self._file, self._size, self._known = fresh, 0, {}
        self._resume()

    def _resume(self) -> None:
        """Read what is there, and cut off what was not finished."""
        self._file.seek(0)
        data = self._file.readall()
        assert data is not None, "a file on disk does not block"
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        if not whole:
            self._write(self.origin)
            return
        origin, rollouts = _decoded(self.path, data[:whole])
        if others := _differing(origin, self.origin):
            if others != ["fingerprints"] or not self._may_change:
                what = f"holds rollouts of another origin ({', '.join(others)})"
                raise InputError([Problem(str(self.path), what, "use another file")])
            both = origin.fingerprints.items() ^ self.origin.fingerprints.items()
            self.changed_verifiers = tuple(sorted({name for name, _ in both}))
        self.newest_version = max(
            (version for each in rollouts for version in each.versions), default=-1
        )
        first, *lines = data[:whole].splitlines(keepends=True)
        self._size = len(first)
        for rollout, line in zip(rollouts, lines, strict=True):
            self._known[rollout.key] = self._size, len(line)
            self._size += len(line)

    def _write(self, value: RolloutOrigin | Rollout) -> None:
        line = _encoded(value)
        self._size += len(line)
        while line:
            line = line[self._file.write(line) :]


class RecordedRollouts(msgspec.Struct, frozen=True):
    """What a file of rollouts holds."""

    origin: RolloutOrigin
    rollouts: tuple[Rollout, ...]


def read_jsonl(path: str | Path) -> RecordedRollouts:
    """Read a file of lines; raises `DamagedFile` with what could be read where its end is gone."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        raise InputError([Problem(str(path), what, "give a file of rollouts")]) from error
    whole = data.rfind(b"\n") + 1
    origin, rollouts = _decoded(path, data[:whole])
    if whole < len(data):
        what = f"breaks off after {len(rollouts):,} rollouts"
        kept = RecordedRollouts(origin, tuple(rollouts))
        raise DamagedFile([Problem(str(path), what, "go on with the run that wrote it")], kept)
    return RecordedRollouts(origin, tuple(rollouts))


def read_origin(path: Path) -> RolloutOrigin | None:
    """Return where the rollouts of a file come from; None where its beginning is not there."""
    try:
        with path.open("rb") as lines:
            return msgspec.json.decode(lines.readline(), type=RolloutOrigin)
    except (OSError, msgspec.DecodeError):
        return None


def write_jsonl(path: str | Path, recorded: RecordedRollouts) -> None:
    """Write rollouts as lines; the file is there whole or not at all."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    lines = map(_encoded, (recorded.origin, *recorded.rollouts))
    beside.write_bytes(b"".join(lines))
    beside.replace(path)


def _decoded(path: Path, data: bytes) -> tuple[RolloutOrigin, list[Rollout]]:
    lines = data.split(b"\n")[:-1]
    if not lines:
        what = "holds no whole line"
        raise InputError([Problem(str(path), what, "give a file of rollouts")])
    validate_format(path, lines[0])
    try:
        origin = msgspec.json.decode(lines[0], type=RolloutOrigin)
    except msgspec.DecodeError as error:
        what = f"does not begin as a file of rollouts: {error}"
        raise InputError([Problem(f"{path}:1", what, "give a file of rollouts")]) from error
    decoder, rollouts = msgspec.json.Decoder(Rollout), []
    for number, line in enumerate(lines[1:], 2):
        try:
            rollouts.append(decoder.decode(line))
        except (msgspec.DecodeError, InputError) as error:
            kept = RecordedRollouts(origin, tuple(rollouts))
            what = f"is no rollout: {error}"
            raise DamagedFile([Problem(f"{path}:{number}", what, "cut it out")], kept) from error
    validate_unique_keys(path, rollouts)
    return origin, rollouts


class _Header(msgspec.Struct, frozen=True):
    """What every version of the format begins with."""

    format: str


def validate_format(path: Path, origin: bytes) -> None:
    """Raise where a file is of another version of this format, by its origin as JSON."""
    try:
        found = msgspec.json.decode(origin, type=_Header).format
    except msgspec.DecodeError:
        return  # not an origin of any version, which whoever decodes it reports
    if found != FORMAT_VERSION:
        what = f"has the format {found!r}; this version reads {FORMAT_VERSION!r}"
        fix = "generate the rollouts again, in a new run folder"
        raise InputError([Problem(str(path), what, fix)])


def validate_unique_keys(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Raise where a rollout stands in a file twice: it would be trained on twice."""
    seen: set[RolloutKey] = set()
    for rollout in rollouts:
        if rollout.key in seen:
            what = f"has {rollout.key.label} twice"
            raise InputError([Problem(str(path), what, "cut one of them out")])
        seen.add(rollout.key)


def _encoded(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _differing(found: RolloutOrigin, wanted: RolloutOrigin) -> list[str]:
    """Name what rollouts of two origins do not have in common."""
    same = {
        "environment": found.environment == wanted.environment,
        "rollout_config": found.rollout_config.samples_like(wanted.rollout_config),
        "fingerprints": found.fingerprints == wanted.fingerprints,
        # A path may be written in several ways; a name is its own.
        "model": make_absolute_path(found.model) == make_absolute_path(wanted.model),
    }
    return [name for name, alike in same.items() if not alike]
