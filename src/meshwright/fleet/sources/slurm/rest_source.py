"""slurmrestd, over HTTP or a unix socket, asked for what is new.

The token (`SLURM_JWT`, or `--token`'s) goes into a header and nowhere else.
"""

import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.slurm.formats.json_objects import Object
from meshwright.fleet.sources.slurm.snapshot import SlurmSnapshot, split_batches
from meshwright.fleet.sources.source import RowBatch, Secret, SourceOptions, strip_credentials

OVERLAP_S: Final = 3600.0
_WAITS_S: Final = (0.5, 1.0, 2.0)
_TIMEOUT_S: Final = 60.0
_FIRST_S: Final = 946684800.0
"""2000-01-01, before which there was no Slurm; it takes very early times for mistakes."""
_VERSION = re.compile(r"/(slurm|slurmdb)/v(\d+)\.(\d+)\.(\d+)/(jobs|nodes)/?$")


class _Answer(NamedTuple):
    status: int
    body: bytes


class SlurmRestSource:
    """A source that asks slurmrestd, with a token that may only read."""

    def __init__(
        self, where: str, asked: SourceOptions, renames: Mapping[str, str], user: str = "",
        overlap_s: float = OVERLAP_S,
    ) -> None:  # fmt: skip
        self._asked, self._renames, self._overlap_s = asked, renames, overlap_s
        self._url = where.removeprefix("slurm+")
        if "://" not in self._url:
            self._url = f"unix://{self._url}"
        self._user = user or os.environ.get("SLURM_JWT_USER", "")
        self._token = asked.token or Secret(os.environ.get("SLURM_JWT", ""))
        self._retried = 0

    @property
    def name(self) -> str:
        """What it is and where, without credentials."""
        return f"slurm+{strip_credentials(self._url)}"

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give what changed since the cursor, and how everything stands now."""
        before = json.loads(cursor)["until_s"] if cursor else None
        now = time.time()
        paths = self._paths()
        reading = SlurmSnapshot("UTC", self._renames, cluster_alias=self._asked.cluster)
        since = self._asked.since_s if before is None else before - self._overlap_s
        self._accounting(paths, since, reading)
        for what in ("jobs", "nodes"):
            path = paths.get(("slurm", what))
            if path:
                reading.add_json(self._get(path))
        if self._retried:
            reading.notes.append(f"{self.name}: asked again {self._retried} times after no answer")
        fresh = json.dumps({"until_s": min(now, self._asked.until_s or now)})
        yield from split_batches(reading.build_rows(now), self._asked, fresh, reading.notes)

    def _accounting(
        self, paths: Mapping[tuple[str, str], str], since_s: float | None, reading: SlurmSnapshot
    ) -> None:
        path = paths.get(("slurmdb", "jobs"))
        if path is None:
            reading.notes.append(f"{self.name}: serves no accounting, so nothing of jobs long gone")
            return
        # Plugins before v0.0.40 read times as Slurm's commands do, which want a mark.
        mark = "uts" if "/v0.0.3" in path else ""
        query = {"start_time": f"{mark}{max(_FIRST_S, since_s or 0.0):.0f}"}
        if self._asked.until_s is not None:
            query["end_time"] = f"{mark}{self._asked.until_s:.0f}"
        if self._knows_duplicates:
            query["show_duplicates"] = "true"
        reading.add_json(self._get(path, query))

    def _paths(self) -> dict[tuple[str, str], str]:
        """Find the newest version of each path that the server describes."""
        document = self._get("/openapi/v3", fallback="/openapi")
        newest: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        self._knows_duplicates = False
        for path, described in (document.get("paths") or {}).items():
            found = _VERSION.search(path)
            if not found:
                continue
            key, version = (found[1], found[5]), tuple(int(part) for part in found.groups()[1:4])
            if version > newest.get(key, ((), ""))[0]:
                newest[key] = (version, path.rstrip("/"))
                if key == ("slurmdb", "jobs"):
                    self._knows_duplicates = "show_duplicates" in json.dumps(described)
        if not newest:
            what, fix = "does not describe jobs or nodes", "name the root of a slurmrestd"
            raise InputError([Problem(self.name, what, fix)])
        return {key: path for key, (_, path) in newest.items()}

    def _get(self, path: str, query: Mapping[str, str] = {}, fallback: str = "") -> Object:
        target = f"{path}?{urlencode(query)}" if query else path
        answer = self._answered(target)
        if answer.status == 404 and fallback:
            return self._get(fallback)
        if answer.status in {401, 403}:
            fix = "set SLURM_JWT to a token of `scontrol token`, which is good for a while only"
            raise InputError([Problem(f"{self.name}{path}", "does not accept the token", fix)])
        try:
            document: Any = json.loads(answer.body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            what = f"answered {answer.status} with what is no JSON"
            raise InputError([Problem(f"{self.name}{path}", what, "name the root of a slurmrestd")])
        errors = document.get("errors") or []
        if errors and all("Nothing found" in str(error) for error in errors):
            return document  # nothing in this window is an answer, though not to Slurm
        if answer.status != 200 and errors:
            said = errors[0].get("description") or errors[0].get("error") or "an error"
            raise InputError([Problem(f"{self.name}{path}", f"answered {answer.status}: {said}")])
        return document

    def _answered(self, target: str) -> _Answer:
        fault: Exception | None = None
        for wait in (0.0, *_WAITS_S):
            time.sleep(wait)
            try:
                answer = self._once(target)
            except (OSError, http.client.HTTPException) as error:
                self._retried += 1
                fault = error
                continue
            if answer.status < 500 or answer.body.lstrip().startswith(b"{"):
                return answer
            self._retried += 1
            fault = OSError(f"status {answer.status}")
        what, fix = f"does not answer: {fault}", "see that slurmrestd runs there"
        raise InputError([Problem(self.name, what, fix)]) from fault

    def _once(self, target: str) -> _Answer:
        connection = self._connection()
        headers = {"Accept": "application/json", "Host": "localhost"}
        if self._token:
            headers["X-SLURM-USER-TOKEN"] = self._token.reveal()
            if self._user:
                headers["X-SLURM-USER-NAME"] = self._user
        try:
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            return _Answer(response.status, response.read())
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._url)
        if parts.scheme == "unix":
            return _UnixConnection(unquote(parts.netloc + parts.path))
        host, port = parts.hostname or "localhost", parts.port or 6820
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self._asked.ca_file or None)
            return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)
