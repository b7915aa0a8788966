"""`KubernetesSource`: pods and nodes of a cluster, through the official client, reading only."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.sources.kubernetes.nodes import build_node_rows, read_labels
from meshwright.fleet.sources.kubernetes.pod_history import update_history
from meshwright.fleet.sources.kubernetes.pods import build_job_rows
from meshwright.fleet.sources.kubernetes.quantities import get_mapping
from meshwright.fleet.sources.kubernetes.whole_nodes import infer_whole_node_allocations
from meshwright.fleet.sources.source import RowBatch, SourceOptions

OPTIONS = ("namespace", "label_selector")
_PAGE = 500
"""Objects in one answer: a cluster may have many thousands."""
_OK, _GONE = 200, 410


class KubernetesSource:
    """One cluster."""

    def __init__(
        self, core: Any, context: str, asked: SourceOptions, now: Callable[[], float] = time.time
    ) -> None:
        self._core, self._context, self._asked, self._now = core, context, asked, now

    @property
    def name(self) -> str:
        """The context that names the cluster."""
        return f"kubernetes {self._context}"

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give the pods and nodes there are now; the cursor remembers those there were."""
        kept = _kept(cursor)
        seen_s, cluster = self._now(), self._asked.cluster or self._context
        notes: list[str] = []
        nodes = self._list(self._core.list_node, notes)
        table, standing = build_node_rows(nodes, kept["nodes"], cluster, seen_s)
        yield RowBatch("nodes", table, None, tuple(notes))
        found = build_job_rows(self._pods(notes), read_labels(nodes), cluster, seen_s)
        rows, pods = update_history(found, kept["pods"], seen_s)
        sizes = dict(zip(table["node"].to_pylist(), table["gpus"].to_pylist(), strict=True))
        yield RowBatch("allocations", infer_whole_node_allocations(rows.to_pylist(), sizes, seen_s))
        yield RowBatch("jobs", rows, json.dumps({"nodes": standing, "pods": pods}), tuple(notes))

    def _pods(self, notes: list[str]) -> list[Mapping[str, Any]]:
        options = self._asked.kind_options
        words = {"label_selector": options["label_selector"]} if "label_selector" in options else {}
        if space := options.get("namespace"):
            return self._list(self._core.list_namespaced_pod, notes, namespace=space, **words)
        return self._list(self._core.list_pod_for_all_namespaces, notes, **words)

    def _list(self, call: Any, notes: list[str], **words: str) -> list[Mapping[str, Any]]:
        """Read all pages of a list."""
        found, rest = list[Mapping[str, Any]](), ""
        for _ in range(3):
            try:
                while True:
                    page = self._page(call, words | ({"_continue": rest} if rest else {}))
                    found += page["items"]
                    rest = get_mapping(page, "metadata").get("continue") or ""
                    if not rest:
                        return found
            except _Expired:
                notes.append(f"{self.name}: a list changed while it was read; read again")
                found, rest = [], ""
        raise MissingDependency(f"{self.name}: a list never came to its end", "try again later")

    def _page(self, call: Any, words: Mapping[str, str]) -> Mapping[str, Any]:
        """Read one page as it comes: models of the client refuse what a newer cluster adds."""
        client, pool = import_module("kubernetes.client"), import_module("urllib3.exceptions")
        try:
            answer = call(limit=_PAGE, _preload_content=False, _request_timeout=60, **words)
            status, reason, body = answer.status, answer.reason, answer.data
        except client.ApiException as error:
            status, reason, body = error.status, error.reason, b""
        except (OSError, pool.HTTPError) as error:
            hint = "see that the cluster can be reached with kubectl get nodes"
            what = f"{self.name} does not answer: {type(error).__name__}"
            raise MissingDependency(what, hint) from None
        if status == _GONE:
            raise _Expired
        if status != _OK:
            raise _refusal(self.name, status, reason)
        try:
            page = json.loads(body)
        except ValueError:
            page = None
        if not isinstance(page, dict) or not isinstance(page.get("items"), list):
            fix = "name the address of an API server"
            raise InputError([Problem(self.name, "answers something that is no list", fix)])
        return page


class _Expired(Exception):
    """The rest of a list is no longer to be had."""


def matches(where: str) -> bool:
    """Return whether this is `kubernetes:CONTEXT` or a kubeconfig file."""
    if where.startswith("kubernetes:"):
        return True
    path = Path(where)
    if "://" in where or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8192)
    return b"kind: Config" in head and b"clusters:" in head


def open_source(where: str, asked: SourceOptions) -> KubernetesSource:
    """Open the cluster of a context, of a kubeconfig file, or the one this process runs in."""
    unknown = sorted(set(asked.kind_options) - set(OPTIONS))
    if unknown:
        fix = f"options of Kubernetes are {', '.join(OPTIONS)}"
        raise InputError([Problem(f"--option {each}", "is not known", fix) for each in unknown])
    try:
        client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
    except ImportError:
        hint = 'pip install "meshwright[kubernetes]"'
        raise MissingDependency("reading Kubernetes needs its official client", hint) from None
    if where.startswith(("http://", "https://")):
        settings = client.Configuration()
        settings.host = where.rstrip("/")
        settings.ssl_ca_cert = asked.ca_file or None
        if asked.token:
            settings.api_key = {"authorization": f"Bearer {asked.token.reveal()}"}
        api, name = client.ApiClient(settings), where.rstrip("/")
    else:
        api, name = _by_config(client, config, where)
    return KubernetesSource(client.CoreV1Api(api), name, asked)


def _by_config(client: Any, config: Any, where: str) -> tuple[Any, str]:
    """Take the context that is named, or the current one, or the cluster this runs in."""
    context = where.removeprefix("kubernetes:").removeprefix("//")
    file = None if where.startswith("kubernetes:") else where
    try:
        if file is not None:
            return config.new_client_from_config(config_file=file), where
        try:
            api = config.new_client_from_config(context=context or None)
            return api, context or str(config.list_kube_config_contexts()[1]["name"])
        except config.ConfigException:
            if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise
        settings = client.Configuration()
        config.load_incluster_config(client_configuration=settings)
        return client.ApiClient(settings), "in-cluster"
    except config.ConfigException as error:
        fix = "name a context of kubectl config get-contexts: kubernetes:CONTEXT"
        raise InputError([Problem(where, f"cannot open: {error}", fix)]) from None


def _refusal(name: str, status: int, reason: str) -> InputError:
    if status in (401, 403):
        what = f"refuses who asks (HTTP {status})"
        fix = "bind a ClusterRole that may get and list pods and nodes; nothing else is needed"
    else:
        what, fix = f"refuses (HTTP {status} {reason})", "see the server's log"
    return InputError([Problem(name, what, fix)])


def _kept(cursor: str | None) -> dict[str, Any]:
    try:
        found = json.loads(cursor or "{}")
        nodes = {
            name: (str(state), float(since)) for name, (state, since) in found["nodes"].items()
        }
        return {"nodes": nodes, "pods": dict(found["pods"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"nodes": {}, "pods": {}}
