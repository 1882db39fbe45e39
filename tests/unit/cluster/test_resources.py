"""What roles need against what nodes have free: what is missing is said in words, with both figures."""

from __future__ import annotations

import pytest

from bagpipe.cluster.resources import Need, Node, described, missing

SERVERS = [Need(f"server {number}", 1, memory_bytes=4_000_000_000) for number in range(2)]
TRAINER = Need("trainer 0", 2, gpus=1)


def node(name, cores=0.0, gpus=0.0, gigabytes=0.0):
    return Node(name, {"CPU": cores, "GPU": gpus, "memory": gigabytes * 1e9})


def test_a_bundle_names_only_what_is_needed():
    assert SERVERS[0].bundle() == {"CPU": 1, "memory": 4e9}
    assert TRAINER.bundle() == {"CPU": 2, "GPU": 1}
    assert Need("oracle").bundle() == {}


def test_nothing_is_missing_where_everything_fits():
    assert missing([*SERVERS, TRAINER], [node("a", 2, 1), node("b", 2, 0, 8)]) is None


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("a", 3, 1, 8)], ["cores: 4 needed, 3 free"]),
        ([node("a", 4, 0, 8)], ["GPUs: 1 needed, 0 free"]),
        ([node("a", 4, 1, 3), node("b", 0, 0, 3)], ["memory: 8 GB needed, 6 GB free"]),
        ([], ["cores: 4 needed, 0 free", "GPUs: 1 needed, 0 free", "memory: 8 GB needed, 0 GB free"]),
        ([Node("a", {})], ["cores: 4 needed, 0 free"]),
    ],
)
def test_what_is_missing_altogether_is_said_with_what_is_free(nodes, words):
    said = missing([*SERVERS, TRAINER], nodes)
    assert said is not None
    assert all(each in said for each in words)


def test_a_role_that_fits_on_no_single_node_is_named_with_what_each_node_has():
    nodes = [node("10.0.0.1", 3, 0, 8), node("10.0.0.2", 1, 1, 8)]
    said = missing([*SERVERS, TRAINER], nodes)
    assert said is not None
    assert said.startswith("trainer 0 needs cores 2, GPUs 1 on one node")
    assert "10.0.0.1 has cores 3, GPUs 0, memory 8 GB; 10.0.0.2 has cores 1, GPUs 1, memory 8 GB" in said
    assert described(nodes) in said
