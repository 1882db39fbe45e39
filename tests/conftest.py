"""What holds for every test."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

# Before torch is loaded, for this process and those that tests start. PyTorch's threads that have nothing to do sleep:
# where several processes share few cores they would spin away the time of those that have. And bytecode is kept,
# whatever the environment says: hundreds of processes would each compile the package.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts tests in the background has them ignore Ctrl-C, and so would the processes that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402

pytest.register_assert_rewrite("harness", "definitions", "ecosystem")

from harness.examples import PROFILE  # noqa: E402  (its asserts are rewritten, and every test's settings need it)

# Matrices as small as those of tests gain nothing from a second thread, and where cores are few they wait for it.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """The next test has one too, whatever this one sets."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_program(monkeypatch):
    """Data is prepared as in a process of its own: what earlier tests left in this one's memory does not count."""
    monkeypatch.setattr("bagpipe.data.prepare.options.resident_bytes", lambda: 300_000_000)


@pytest.fixture
def scratch(monkeypatch):
    """Where launches put files of their own, which must be gone in the end; its name is short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def pytest_collection_finish(session):
    """What was imported stays: no collection goes through these hundreds of thousands of objects again."""
    if len(session.items) > 200:
        import torch._dynamo  # noqa: F401  (the largest part, which the first optimizer imports)
    gc.collect()
    gc.freeze()


def pytest_report_header():
    """Which examples property tests try."""
    return f"hypothesis profile of this run: {PROFILE} (HYPOTHESIS_PROFILE)"
