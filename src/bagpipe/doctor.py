"""What this machine has, what would go wrong when Bagpipe runs on it, and how to mend it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES_MIN = 2 * 10**9
DISK_BYTES_MIN = 2 * 10**9


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    ok: bool | None
    """None: worth knowing, nothing to mend."""
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> list[Check]:
    """All findings, worst things first to go wrong first."""
    checks: list[Callable[[], Check]] = [
        _python, _torch, _numba, _kernel_cache, _cores, _memory, _disk, _open_files, _accelerator, _fbgemm,
    ]  # fmt: skip
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Check(name, False, f"{type(error).__name__}: {error}", "reinstall with `make clean install`")


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check("python", good, platform.python_version(), "" if good else "install 3.11 or newer")


def _torch() -> Check:
    import torch

    parts = torch.__version__.split("+")[0].split(".")
    good = (int(parts[0]), int(parts[1])) >= (2, 13)
    kind = "CUDA build" if torch.version.cuda else "CPU build"
    return Check("torch", good, f"{torch.__version__} ({kind})", "" if good else "install torch 2.13 or newer")


def _numba() -> Check:
    import numba
    import numpy as np

    @numba.njit
    def add(values: Any) -> Any:
        total = np.float32(0)
        for value in values:
            total += value
        return total

    works = float(add(np.ones(8, np.float32))) == 8.0
    return Check("numba", works, f"{numba.__version__}, compiles" if works else "miscompiles", "")


def _kernel_cache() -> Check:
    """Numba keeps them in NUMBA_CACHE_DIR, beside the package or in the user's cache, where it can write."""
    from bagpipe.kernels import kept_in
    from bagpipe.kernels.oracle import read

    place = kept_in(read)
    if place:
        return Check("compiled kernels", True, f"kept in {place}")
    return Check(
        "compiled kernels",
        None,
        "can't be kept: each start compiles for some seconds",
        "set NUMBA_CACHE_DIR to a directory that can be written",
    )


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        return Check("cores", True, f"{cores}")
    return Check("cores", None, "1: rows move while the model waits", "give the process 2 or more")


def _memory() -> Check:
    free = _memory_available()
    if free is None:
        return Check("memory", None, "unknown on this system")
    good = free >= MEMORY_BYTES_MIN
    return Check("memory", good, f"{free / 1e9:.1f} GB available", "" if good else "free some, or lower `batch_size`")


def _memory_available() -> int | None:
    """What the machine has free, or what the control group leaves, whichever is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        return min(free or sys.maxsize, int(limit) - used) if limit.isdigit() else free
    except (OSError, ValueError):
        return free


def _disk() -> Check:
    where = tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    good = free >= DISK_BYTES_MIN
    return Check("disk", good, f"{free / 1e9:.1f} GB free in {where}", "" if good else "free some, or set TMPDIR")


def _open_files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft >= 1024 or soft == resource.RLIM_INFINITY
    return Check("open files", good, f"at most {soft}", "" if good else "raise it with `ulimit -n 4096`")


def _accelerator() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check("accelerator", None, f"{torch.cuda.get_device_name(0)}: the CUDA path is untested, see the docs")
    return Check("accelerator", None, "none: training runs on the processor")


def _fbgemm() -> Check:
    there = importlib.util.find_spec("fbgemm_gpu") is not None
    remedy = "" if there else "only for comparing in `bagpipe bench embedding`: pip install 'bagpipe[bench]'"
    return Check("FBGEMM", None, "installed" if there else "not installed", remedy)
