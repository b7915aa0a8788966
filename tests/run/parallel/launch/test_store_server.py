import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="stores need torch")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from meshwright.errors import InputError
from meshwright.run.parallel.launch import store_server
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.launch.store_server import (
    listen_for_nodes,
    open_store_server,
    use_loopback_interface,
)
from meshwright.run.parallel.launch.world import World, rendezvous
from tests.listening_sockets import list_listening_addresses

SOURCE = Path(store_server.__file__).parents[4]
linux_only = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="/proc lists sockets")


def hosts() -> set[str]:
    """Return the addresses at which this process listens."""
    return {host for host, _ in list_listening_addresses()}


@linux_only
def test_a_store_listens_on_loopback_only() -> None:
    before = list_listening_addresses()
    store = open_store_server()
    assert list_listening_addresses() - before == {("127.0.0.1", store.port)}


def test_a_store_answers_its_clients() -> None:
    store = open_store_server(world_size=2)
    patience = timedelta(seconds=5)
    other = TCPStore(
        "127.0.0.1", store.port, is_master=False, timeout=patience, wait_for_workers=False
    )
    other.set("name", "value")
    assert store.get("name") == b"value"


def _open_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@linux_only
@pytest.mark.parametrize(
    "address", ["127.0.0.1", "localhost", "node-of-a-single-node-job", "10.1.2.3"]
)
def test_rank_0_of_one_node_listens_on_loopback_whatever_its_host_is_called(address: str) -> None:
    before = list_listening_addresses()
    world = World(0, 4, 0, 4, address, _open_port())
    store = rendezvous(world, environment={})
    assert list_listening_addresses() - before == {("127.0.0.1", world.port)}
    del store


@linux_only
def test_rank_0_of_several_nodes_listens_where_it_is_told() -> None:
    before = list_listening_addresses()
    world = World(0, 4, 0, 2, "node-that-nobody-knows.invalid", _open_port())
    store = rendezvous(world, environment={"MESHWRIGHT_STORE_BIND": "127.0.0.1"})
    assert list_listening_addresses() - before == {("127.0.0.1", world.port)}
    del store


def test_a_bind_address_of_another_host_is_refused() -> None:
    world = World(0, 4, 0, 2, "192.0.2.1", _open_port())
    with pytest.raises(InputError, match="MASTER_PORT"):
        rendezvous(world, environment={"MESHWRIGHT_STORE_BIND": "192.0.2.1"})


def test_a_name_that_leads_to_loopback_here_is_reached_from_other_nodes() -> None:
    with listen_for_nodes("localhost", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
        place = ("127.0.0.1", listener.getsockname()[1])
        socket.create_connection(place, timeout=5).close()


def test_a_store_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        world = World(0, 2, 0, 2, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(InputError, match="is in use by another program"):
            rendezvous(world, environment={})


def test_interfaces_that_the_user_chose_stay() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    use_loopback_interface(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "lo"}


def _listening_of_a_rank() -> set[str]:
    dist.all_reduce(torch.ones(3))
    return hosts()


@linux_only
def test_ranks_of_one_machine_listen_on_loopback_only() -> None:
    assert spawn_ranks(2, _listening_of_a_rank) == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_no_module_opens_a_store_of_its_own() -> None:
    """A store made with `is_master` and without a bound socket listens at every address."""
    own = re.compile(
        r"TCPStore\((?!.{0,200}is_master=False)|init_method=|(?<!def )_create_c10d_store", re.DOTALL
    )
    places = {
        str(path.relative_to(SOURCE)): match[0]
        for path in SOURCE.rglob("*.py")
        if path.name != "store_server.py" and (match := own.search(path.read_text()))
    }
    assert not places
