"""Where roles listen and with which keys: plain bytes only on loopback, unless chosen by name."""

from __future__ import annotations

import pickle

import pytest

from bagpipe.cluster.settings import Introduction
from bagpipe.cluster.wiring import wire
from bagpipe.errors import ClusterError
from bagpipe.wire.keys import Keys


def introduced(*places):
    return {
        f"server {number}": Introduction("1", f"host{machine}", machine, address, 1)
        for number, (machine, address) in enumerate(places)
    }


HERE = ("a", "10.0.0.1")
THERE = ("b", "10.0.0.2")


def test_roles_on_one_machine_use_loopback_without_keys():
    hosts, wiring = wire(introduced(HERE, HERE), None, "tls")
    assert set(hosts.values()) == {"tcp://127.0.0.1:0"}
    assert wiring.listener is wiring.client is None


def test_roles_on_several_machines_use_their_addresses_with_keys_made_for_each_other():
    hosts, wiring = wire(introduced(HERE, THERE), None, "tls")
    assert hosts == {"server 0": "tcp://10.0.0.1:0", "server 1": "tcp://10.0.0.2:0"}
    assert isinstance(wiring.listener, Keys)
    assert isinstance(wiring.client, Keys)
    assert (wiring.listener.role, wiring.client.role) == ("server", "client")
    assert wiring.listener.peer == wiring.client.certificate
    assert wiring.client.peer == wiring.listener.certificate


def test_an_interface_that_is_named_is_used_on_one_machine_too_and_with_keys():
    hosts, wiring = wire(introduced(HERE, HERE), "eth0", "tls")
    assert set(hosts.values()) == {"tcp://10.0.0.1:0"}
    assert isinstance(wiring.listener, Keys)


def test_plain_bytes_between_machines_are_chosen_by_name():
    _, wiring = wire(introduced(HERE, THERE), None, "none")
    assert (wiring.listener, wiring.client) == ("none", "none")


def test_every_run_has_keys_and_a_number_of_its_own_and_shows_no_secret():
    (_, one), (_, two) = (wire(introduced(HERE, THERE), None, "tls") for _ in range(2))
    assert one.run != two.run
    assert one.listener.secret != two.listener.secret
    assert one.listener.secret not in repr(one)
    assert pickle.loads(pickle.dumps(one)) == one


def test_loopback_on_several_machines_is_refused():
    with pytest.raises(ClusterError, match=r"server 0 on hosta has the address 127.0.0.1.*--interface"):
        wire(introduced(("a", "127.0.0.1"), THERE), None, "tls")


def test_an_ipv6_address_is_written_with_brackets():
    hosts, _ = wire(introduced(("a", "fd00::1"), ("b", "fd00::2")), None, "tls")
    assert hosts["server 0"] == "tcp://[fd00::1]:0"
