"""`PrometheusClient`: queries a Prometheus HTTP API, retries lost connections and reports them.

Only questions are sent, never anything that changes the server. Redirects are not followed, so that
a token goes nowhere but to the host that was named.
"""

import contextlib
import random
import ssl
import time
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec
import numpy as np

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.sources.prometheus.credentials import Credentials, NoCredentials
from meshwright.fleet.sources.prometheus.response import (
    ApiResponse,
    TimeSeries,
    parse_list,
    parse_response,
    parse_series,
)
from meshwright.fleet.sources.source import strip_credentials

MAX_POINTS = 10_000
"""Of a series in one answer; Prometheus refuses more than 11,000."""
_LONGEST_URL = 4_000
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_TOO_MUCH = (
    "too many samples", "maximum resolution", "exceeds the limit", "limit exceeded",
    "max-series", "max-samples", "too many series", "maximum number of", "too many points",
)  # fmt: skip
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0


class RetryPolicy(NamedTuple):
    """How long a server that does not answer is asked again."""

    retry_timeout_s: float = 180.0
    """From the first failure of a request until it is given up."""
    request_timeout_s: float = 120.0
    """For one answer."""
    connect_timeout_s: float = 15.0
    """In place of `retry_timeout_s` while it has never been reached: its address may be wrong."""


class QueryTooLargeError(Exception):
    """The server will not answer this much at once."""


class _DropOut(Exception):
    """No answer, or half of one: worth asking again."""

    def __init__(self, said: str, after_s: float = 0.0) -> None:
        super().__init__(said)
        self.after_s = after_s


class PrometheusClient:
    """One server."""

    def __init__(
        self,
        url: str,
        who: Credentials | None = None,
        *,
        ca_file: str = "",
        tenant: str = "",
        patience: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            fix = "give a URL such as http://prometheus:9090"
            raise InputError(
                [Problem(strip_credentials(url), "is no address of a Prometheus", fix)]
            )
        if parts.username or parts.password:
            fix = "leave them out of the URL; use --option user=NAME --option password_file=PATH"
            raise InputError([Problem(strip_credentials(url), "holds a user or a password", fix)])
        self.url = strip_credentials(url)
        self._parts, self._path = parts, parts.path.rstrip("/")
        self._who = NoCredentials() if who is None else who
        self._tls = _tls(ca_file, self.url) if parts.scheme == "https" else None
        self._tenant, self._patience, self._sleep = tenant, patience or RetryPolicy(), sleep
        self._tell = tell
        self._connection: HTTPConnection | None = None
        self._reached = False
        self._notes: list[str] = []

    def pop_notes(self) -> tuple[str, ...]:
        """Return what went wrong since the last call, and forget it."""
        found, self._notes = tuple(dict.fromkeys(self._notes)), []
        return found

    def query_instant(self, expression: str, at_s: float) -> list[TimeSeries]:
        """Ask for values at a moment; `m[5m]` gives the raw samples of five minutes."""
        words = (("query", expression), ("time", f"{at_s:.3f}"))
        return parse_series(self._ask("/api/v1/query", words).data)

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[TimeSeries]:
        """Ask for values from a start to an end, both included, in as many answers as it takes."""
        points = int(np.floor((end_s - start_s) / step_s + 1e-9)) + 1
        pieces = [
            self._piece(expression, start_s + at * step_s, min(MAX_POINTS, points - at), step_s)
            for at in range(0, points, MAX_POINTS)
        ]
        return _joined([series for piece in pieces for series in piece], len(pieces) > 1)

    def find_series(
        self, matchers: Sequence[str], start_s: float, end_s: float
    ) -> list[dict[str, str]]:
        """Ask for the labels of all series that match."""
        words = [*(("match[]", each) for each in matchers), *_between(start_s, end_s)]
        return parse_list(self._ask("/api/v1/series", words).data)

    def list_label_values(self, label: str, matcher: str, start_s: float, end_s: float) -> set[str]:
        """Ask for the values that a label has among series that match."""
        words = [("match[]", matcher), *_between(start_s, end_s)]
        return set(parse_list(self._ask(f"/api/v1/label/{label}/values", words).data))

    def list_metric_names(self, matcher: str, start_s: float, end_s: float) -> set[str]:
        """Ask for the names of metrics that match."""
        return self.list_label_values("__name__", matcher, start_s, end_s)

    def _piece(
        self, expression: str, start_s: float, points: int, step_s: float
    ) -> list[TimeSeries]:
        end_s = start_s + (points - 1) * step_s
        words = (("query", expression), *_between(start_s, end_s), ("step", f"{step_s:.3f}"))
        try:
            return parse_series(self._ask("/api/v1/query_range", words).data)
        except QueryTooLargeError as refused:
            if points == 1:
                what = f"refuses to answer for a single moment: {refused}"
                fix = "read one cluster by --option selector='cluster=\"NAME\"', or raise limits"
                raise InputError([Problem(self.url, what, fix)]) from None
        half = points // 2
        first = self._piece(expression, start_s, half, step_s)
        rest = self._piece(expression, start_s + half * step_s, points - half, step_s)
        return _joined(first + rest, True)

    def _ask(self, path: str, words: Sequence[tuple[str, str]]) -> ApiResponse:
        """Send one question until it is answered, told to be wrong, or patience ends."""
        began, tries, wait_s, said = time.monotonic(), 0, _FIRST_WAIT_S, ""
        waited_s = 0.0
        while True:
            tries += 1
            try:
                answer = self._once(path, words)
            except _DropOut as drop:
                self.close()
                said = str(drop)
                passed_s = max(time.monotonic() - began, waited_s)
                total_s = self._patience.retry_timeout_s
                if not self._reached:
                    total_s = min(total_s, self._patience.connect_timeout_s)
                if passed_s >= total_s:
                    hint = "see that it runs and can be reached; the next ingest goes on from here"
                    what = f"{self.url} does not answer: {said} ({tries} tries, {passed_s:.0f} s)"
                    raise MissingDependency(what, hint) from None
                if tries == 1 and self._tell is not None:
                    left = f"for up to {total_s:.0f} s"
                    self._tell(f"{self.url} does not answer: {said}; asking again {left}")
                # Many who wait for one server should not all come back at once.
                pause_s = max(drop.after_s, wait_s * (0.75 + random.random() / 2))
                self._sleep(pause_s)
                waited_s += pause_s
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                if tries > 1:
                    times = "once" if tries == 2 else f"{tries - 1} times"
                    self._notes.append(
                        f"{self.url} dropped out ({said}) and was asked again {times}; it answered"
                    )
                self._heed(answer)
                return answer

    def _heed(self, answer: ApiResponse) -> None:
        self._notes += [f"{self.url} warns: {each}" for each in answer.warnings[:5]]
        if answer.partial:
            self._notes.append(f"{self.url} answered in part: some of its stores were out of reach")

    def _once(self, path: str, words: Sequence[tuple[str, str]]) -> ApiResponse:
        try:
            status, body, after_s, place = self._exchange(path, words)
        except ssl.SSLCertVerificationError as error:
            fix = "name the certificates that signed it with --ca-file"
            what = f"its certificate is not trusted: {error.verify_message}"
            raise InputError([Problem(self.url, what, fix)]) from None
        except (OSError, HTTPException, zlib.error) as error:
            raise _DropOut(str(error) or type(error).__name__) from None
        try:
            answer = parse_response(body)
        except msgspec.MsgspecError:
            if status == 200:
                raise _DropOut("its answer broke off") from None
            answer = ApiResponse(
                status="error", error=body[:200].decode("utf-8", "replace").strip()
            )
        if status == 200 and answer.status == "success":
            return answer
        if any(word in answer.error.lower() for word in _TOO_MUCH):
            raise QueryTooLargeError(answer.error)
        if status in _AGAIN:
            raise _DropOut(f"HTTP {status} {answer.error[:200]}".strip(), after_s)
        raise _refusal(self.url, status, answer.error, place)

    def _exchange(
        self, path: str, words: Sequence[tuple[str, str]]
    ) -> tuple[int, bytes, float, str]:
        text, target = urlencode(words), self._path + path
        headers = {"Accept": "application/json", "Accept-Encoding": "gzip"}
        if who := self._who.header():
            headers["Authorization"] = who
        if self._tenant:
            headers["X-Scope-OrgID"] = self._tenant
        connection = self._connected()
        if len(target) + len(text) < _LONGEST_URL or "/label/" in path:
            connection.request("GET", f"{target}?{text}", headers=headers)
        else:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            connection.request("POST", target, text.encode(), headers)
        reply = connection.getresponse()
        self._reached = True
        body = reply.read()
        if reply.headers.get("Content-Encoding") == "gzip":
            body = zlib.decompress(body, wbits=31)
        after = reply.headers.get("Retry-After", "")
        after_s = min(float(after), _LONGEST_WAIT_S) if after.isdigit() else 0.0
        return reply.status, body, after_s, reply.headers.get("Location", "")

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            host, port = self._parts.hostname or "", self._parts.port
            wait_s = self._patience.request_timeout_s
            if self._tls is not None:
                self._connection = HTTPSConnection(host, port, timeout=wait_s, context=self._tls)
            else:
                self._connection = HTTPConnection(host, port, timeout=wait_s)
        return self._connection

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _refusal(url: str, status: int, said: str, place: str) -> InputError:
    said = said[:300]
    if status in (401, 403):
        what = f"refuses who asks (HTTP {status})"
        fix = "give a token that may read: --token-file, or --option user= with password_file="
    elif 300 <= status < 400:
        what, fix = f"sends on to {strip_credentials(place)}", "name that address if you trust it"
    elif status == 404:
        what, fix = "has no Prometheus API there", "add its prefix to the URL, such as /prometheus"
    else:
        what, fix = f"refuses a query (HTTP {status}): {said}", "see its limits and its log"
    return InputError([Problem(url, what, fix)])


def _tls(ca_file: str, url: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        what = f"cannot read the certificates in {ca_file}: {error.strerror or error}"
        raise InputError([Problem(url, what, "give --ca-file a PEM file")]) from None


def _between(start_s: float, end_s: float) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("start", f"{start_s:.3f}"), ("end", f"{end_s:.3f}")


def _joined(found: list[TimeSeries], several: bool) -> list[TimeSeries]:
    """Put the pieces of each series together in the order of time."""
    if not several:
        return found
    pieces: dict[tuple[tuple[str, str], ...], list[TimeSeries]] = {}
    for each in found:
        pieces.setdefault(tuple(sorted(each.labels.items())), []).append(each)
    return [
        TimeSeries(
            parts[0].labels,
            np.concatenate([each.time_s for each in parts]),
            np.concatenate([each.values for each in parts]),
        )
        for parts in pieces.values()
    ]
