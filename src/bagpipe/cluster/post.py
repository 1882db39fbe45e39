"""A process that takes on a role when it is told to: the one class that Ray makes actors of.

So a process can be ready, with everything imported, before anybody knows whose place it will take.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bagpipe import failpoints

if TYPE_CHECKING:
    from bagpipe.cluster.role import Role

ROLES = {
    "trainer": "TrainerRole",
    "oracle": "OracleRole",
    "processor": "ProcessorRole",
    "server": "ServerRole",
}
"""The class of each kind of role, in `bagpipe.cluster.KIND_role`."""


class Post:
    """One process."""

    def __init__(self, name: str | None = None) -> None:
        self._role: Role | None = None
        if name is not None:
            self.take_on(name)

    def take_on(self, name: str) -> None:
        """Be that role from now on, such as "server 1"."""
        assert self._role is None, "a process has one role, until its end"
        failpoints.name_process(name.replace(" ", "-"))
        self._role = _class_of(name.partition(" ")[0])(name)

    def get_ready(self) -> None:
        """Have everything imported that any role needs, and compiled code loaded."""
        for kind in ROLES:
            _class_of(kind)
        from bagpipe.server.process import warm_up

        warm_up("memory")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have the role do something."""
        assert self._role is not None, "it was given a role"
        return getattr(self._role, method)(*arguments)


class TrainerPost(Post):
    """A trainer: the name that people see among the processes of a machine. So the others."""


class OraclePost(Post):
    """The oracle."""


class ProcessorPost(Post):
    """A data processor."""


class ServerPost(Post):
    """An embedding server."""


POSTS: dict[str, type[Post]] = {
    "trainer": TrainerPost,
    "oracle": OraclePost,
    "processor": ProcessorPost,
    "server": ServerPost,
}


def _class_of(kind: str) -> Any:
    """Imported here and not above: data processors and servers do without PyTorch."""
    return getattr(importlib.import_module(f"bagpipe.cluster.{kind}_role"), ROLES[kind])
