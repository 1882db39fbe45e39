"""A Ray cluster of several nodes on this machine that asks for a token, and goes without leaving anything behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bagpipe.cluster import keeper

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
_NODES = """
import ctypes, os, shutil, sys, tempfile
directory, number, cores = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, directory)
import keeper
ctypes.CDLL(None).prctl(keeper.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
files = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="bagpipe-test-", dir="/tmp")
os.mkdir(files + "/ray")
from ray.cluster_utils import Cluster
node = {"num_cpus": cores, "memory": cores * 5 * 10**8}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
others = [cluster.add_node(**node) for _ in range(number - 1)]
cluster.wait_for_nodes(60)
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(others.pop(), allow_graceful=False)
    print("gone", flush=True)
keeper.end_children()
shutil.rmtree(files, ignore_errors=True)
os._exit(0)
"""


@dataclass
class Nodes:
    """A cluster that is there; join it with `TOKEN` in the environment."""

    address: str
    process: subprocess.Popen

    @property
    def pid(self):
        return self.process.pid

    def lose_one(self):
        """Kill a node that is not the head, with everything on it."""
        self.process.stdin.write("now\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "gone\n"


@contextmanager
def ray_nodes(number, cores):
    """So many nodes that say they have so many cores."""
    process = subprocess.Popen(
        [sys.executable, "-c", _NODES, str(Path(keeper.__file__).parent), str(number), str(cores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | TOKEN,
    )
    try:
        address = process.stdout.readline().strip()
        assert address
        yield Nodes(address, process)
    finally:
        process.communicate(timeout=60)
