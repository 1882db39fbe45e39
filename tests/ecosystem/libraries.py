"""The libraries of requirements.txt, in a directory of their own that the main environment knows nothing of.

`load` installs them where no earlier run has, and puts them behind everything that is installed already. Two things
that their imports would do are kept from them: deepctr-torch asks the package index for its newest version, in a
thread, and RecBole imports the SummaryWriter of TensorBoard, which no model uses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_S_MAX = 240
NAMES = ("deepctr_torch", "torch_rechub", "torchfm", "recbole")


class NotInstalledError(Exception):
    """The libraries are not there and can't be fetched; says why."""


def target() -> Path:
    """Where this Python keeps these versions."""
    key = hashlib.sha256(REQUIREMENTS.read_bytes() + sysconfig.get_platform().encode() + sys.version.encode())
    return ROOT / ".venv/ecosystem" / key.hexdigest()[:16]


@cache
def load() -> None:
    """Make the libraries importable; NotInstalledError where they can't be had."""
    directory = _installed(target())
    sys.path.append(str(directory))
    stands_in = {"deepctr_torch.utils": _module(check_version=lambda _: None)}
    stands_in["torch.utils.tensorboard"] = _module(SummaryWriter=None)
    with patch.dict(sys.modules, stands_in), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = set(sys.modules)
        for name in (*NAMES, "recbole.config", "recbole.data.interaction", "recbole.data.dataset"):
            import_module(name)
        imported = {name: sys.modules[name] for name in set(sys.modules) - before - set(stands_in)}
    sys.modules.update(imported)  # which patch.dict has dropped


def _module(**names: object) -> ModuleType:
    made = ModuleType("stands_in")
    vars(made).update(names)
    return made


def _installed(directory: Path) -> Path:
    """The directory, filled by the first process that asks for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            fresh = directory.with_suffix(".fresh")
            shutil.rmtree(fresh, ignore_errors=True)
            _install(fresh)
            fresh.rename(directory)
    return directory


def _install(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(directory), "--requirement", str(REQUIREMENTS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"pip took longer than {INSTALL_S_MAX} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError(f"pip could not install {REQUIREMENTS.name}: {' '.join(said) or done.stderr}")


def models() -> dict[str, set[str]]:
    """The models that each library has, by the names of their classes."""
    load()
    import torch
    from deepctr_torch.models.basemodel import BaseModel
    from recbole.model.abstract_recommender import AbstractRecommender

    found = {"deepctr-torch": _defined("deepctr_torch.models", BaseModel) - {"BaseModel"}}
    found["torchfm"] = _defined("torchfm.model", torch.nn.Module) - {"LNN"}
    kinds = ("ranking", "matching", "multi_task", "generative")
    found["torch-rechub"] = {name for kind in kinds for name in import_module(f"torch_rechub.models.{kind}").__all__}
    kinds = ("context_aware", "general", "sequential", "knowledge_aware")
    with torch.autograd.set_detect_anomaly(False):  # which a module of RecBole turns on
        packages = [_defined(f"recbole.model.{kind}_recommender", AbstractRecommender) for kind in kinds]
    return found | {"RecBole": set().union(*packages)}


def _defined(package: str, base: type) -> set[str]:
    """Names of the classes of this kind that the modules of a package define."""
    names = set()
    parts = import_module(package).__path__
    for part in pkgutil.walk_packages(parts, f"{package}."):
        module = import_module(part.name)
        kinds = [kind for kind in list(vars(module).values()) if isinstance(kind, type) and issubclass(kind, base)]
        names |= {kind.__name__ for kind in kinds if kind.__module__ == part.name}
    return names
