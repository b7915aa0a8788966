"""`AllowedHosts`: the names under which a server answers.

A page of a stranger can have its own name lead to 127.0.0.1 (DNS rebinding): the browser then
takes what a local server answers for that page's own. The Host header still has the stranger's
name, so that a server which listens on loopback answers only under names of this machine.
"""

import ipaddress
from collections.abc import Sequence

from meshwright.errors import InputError, Problem

ALLOWED_HOSTS_HELP = (
    "names in the Host header that are answered, with commas: .example.com is a domain with its "
    "hosts, * any name (default: names of this machine where it listens on loopback, else any)"
)
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


class AllowedHosts:
    """Names under which a server answers; loopback names are always among them."""

    def __init__(self, names: Sequence[str] = (), *, any_host: bool = False) -> None:
        self._any = any_host or "*" in names
        self._names = frozenset(name.lower().rstrip(".") for name in names if name[:1] != ".")
        self._domains = tuple(name.lower().rstrip(".") for name in names if name[:1] == ".")

    def is_allowed(self, host_header: str | None) -> bool:
        """Tell whether a request with this Host header is answered.

        Without the header no browser asks: such a request is let through.
        """
        if self._any or host_header is None:
            return True
        name = _strip_port(host_header)
        if name is None:
            return False
        return (
            name in self._names
            or is_loopback_name(name)
            or any(name == domain[1:] or name.endswith(domain) for domain in self._domains)
        )


def parse_allowed_hosts(text: str | None, listen_host: str) -> AllowedHosts:
    """Return the names of `--allowed-hosts`, or those that follow from where a server listens."""
    return make_allowed_hosts(split_names(text), listen_host)


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the names of a list with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def make_allowed_hosts(names: Sequence[str], listen_host: str) -> AllowedHosts:
    """Return the names that are given, or those that follow from where a server listens."""
    wrong = [name for name in names if name != "*" and _strip_port(name.lstrip(".")) != _own(name)]
    if wrong:
        fix = "give names without a scheme or port, with commas: page.example.com,10.1.2.3"
        raise InputError(
            Problem("--allowed-hosts", f"{name!r} is no name of a host", fix) for name in wrong
        )
    if not names:
        return AllowedHosts(any_host=not is_loopback_name(listen_host))
    return AllowedHosts([*names, listen_host.strip("[]")])


def is_loopback_name(host: str) -> bool:
    """Tell whether a name or an address leads to this machine and to no other."""
    name = host.lower().strip("[]").rstrip(".")
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _own(name: str) -> str:
    return name.lstrip(".").lower().strip("[]").rstrip(".")


def _strip_port(header: str) -> str | None:
    """Return the host of a Host header in lower case; None where it is malformed."""
    host, port = header.strip(), ""
    if host.startswith("["):
        host, bracket, port = host[1:].partition("]")
        if not bracket or not _is_address(host):
            return None
    elif not _is_address(host):
        host, colon, port = host.partition(":")
        port = colon + port
    if port and not (port[0] == ":" and port[1:].isascii() and (port[1:].isdigit() or port == ":")):
        return None
    host = host.lower().rstrip(".")
    plain = all(letter.isalnum() or letter in "-._:" for letter in host)
    return host if host and plain else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
