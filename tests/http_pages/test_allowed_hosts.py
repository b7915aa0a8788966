import pytest

from meshwright.errors import InputError
from meshwright.http_pages.allowed_hosts import AllowedHosts, parse_allowed_hosts


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1",
        "127.0.0.1:8480",
        "127.9.9.9",
        "[::1]",
        "[::1]:80",
        "::1",
        "localhost.",
        "app.localhost:3000",
        "[::ffff:127.0.0.1]:1",
        "ip6-localhost",
        "localhost:",
        None,
    ],
)
def test_names_of_this_machine_are_answered_on_loopback(header: str | None) -> None:
    assert parse_allowed_hosts(None, "127.0.0.1").is_allowed(header)


@pytest.mark.parametrize(
    "header",
    [
        "evil.example",
        "evil.example:8480",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "192.168.1.1:80",
        "127.0.0.1@evil.example",
        "evil.example#localhost",
        "localhost evil.example",
        "localhost,evil.example",
        "localhost/evil",
        "localhost\\evil",
        "localhost:80:80",
        "localhost:http",
        "localhost:-1",
        "[::1",
        "[::1]x",
        "[localhost]",
        "[]",
        ":80",
        "localhost:٣",
        "xlocalhost",
        "127.1",
        "0x7f000001",
        "2130706433",
        "127.0.0.1\tevil",
        "[::2]",
        "localhost\x00evil",
        "127.0.0.256",
        "",
        "..",
        ".",
    ],
)
def test_other_names_are_not_answered_on_loopback(header: str) -> None:
    assert not parse_allowed_hosts(None, "127.0.0.1").is_allowed(header)


def test_a_server_of_other_machines_answers_under_any_name() -> None:
    for listen in ("0.0.0.0", "::", "10.1.2.3", "node1"):
        assert parse_allowed_hosts(None, listen).is_allowed("node1.cluster:8480")


def test_named_hosts_are_answered_beside_loopback() -> None:
    hosts = parse_allowed_hosts("page.example.com, .cluster.local,10.1.2.3", "0.0.0.0")
    for header in (
        "PAGE.example.com:80",
        "a.cluster.local",
        "cluster.local",
        "10.1.2.3",
        "localhost",
    ):
        assert hosts.is_allowed(header)
    for header in (
        "example.com",
        "xpage.example.com",
        "xcluster.local",
        "10.1.2.4",
        "evil.example",
    ):
        assert not hosts.is_allowed(header)


def test_a_star_allows_any_name() -> None:
    assert parse_allowed_hosts("*", "127.0.0.1").is_allowed("evil.example")


@pytest.mark.parametrize(
    "text", ["http://a.example", "a.example:80", "a b", "a/b", "*.example.com"]
)
def test_names_that_no_header_can_have_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--allowed-hosts"):
        parse_allowed_hosts(text, "127.0.0.1")


def test_loopback_is_always_among_the_names() -> None:
    assert AllowedHosts(["a.example"]).is_allowed("127.0.0.1:1")
