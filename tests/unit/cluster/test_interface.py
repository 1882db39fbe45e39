"""The address of an interface, by its name, its address, or a network."""

from __future__ import annotations

import pytest

from bagpipe.cluster import interface
from bagpipe.cluster.interface import addresses, find_address
from bagpipe.errors import ConfigError


@pytest.fixture
def three(monkeypatch):
    found = [("lo", "127.0.0.1"), ("eth0", "10.1.2.3"), ("eth1", "192.168.7.9"), ("eth1", "fd00::9")]
    monkeypatch.setattr(interface, "addresses", lambda: found)


def test_this_machine_has_a_loopback_interface_that_is_found_in_all_three_ways():
    assert ("lo", "127.0.0.1") in addresses()
    assert find_address("lo") == find_address("127.0.0.1") == find_address("127.0.0.0/8") == "127.0.0.1"


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("eth0", "10.1.2.3"),
        ("eth1", "192.168.7.9"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.0/24", "10.1.2.3"),
        ("10.1.2.77/24", "10.1.2.3"),
        ("fd00::/64", "fd00::9"),
    ],
)
def test_an_interface_has_the_address_that_its_name_or_network_says(three, given, address):
    assert find_address(given) == address


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("given", ["eth2", "10.1.2.4", "10.9.0.0/16", "", "eth0; rm"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(given):
    with pytest.raises(ConfigError, match=r"lo 127.0.0.1, eth0 10.1.2.3, eth1 192.168.7.9"):
        find_address(given)
