"""CURVE keys: who may talk to whom off this machine. Each side proves that it holds its own secret and knows the
public key of the other; a stolen file of a client can't play the server.

Secrets come from files that only their owner can read or from the environment, and show in no text that people see.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import zmq
from zmq.utils import z85

from bagpipe.errors import WireError

VARIABLE = "BAGPIPE_KEYS"
"""Environment variable: the path of a key file, or what is in it."""

Role = Literal["server", "client"]
FORMAT = "bagpipe-keys"
VERSION = 1
FILE_BYTES_MAX = 4096


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a key file holds, as JSON."""

    format: Literal["bagpipe-keys"]
    version: Literal[1]
    role: Role
    public: str
    secret: str
    peer: str


@dataclass(frozen=True, slots=True)
class Keys:
    """One side's pair of keys and the public key of the other side, each as 40 characters (Z85)."""

    role: Role
    public: str
    secret: str = field(repr=False)
    peer: str
    """For a server the key of its clients, for a client that of the servers."""

    def __post_init__(self) -> None:
        for name in ("public", "secret", "peer"):
            _check_key(name, getattr(self, name))
        if zmq.curve_public(self.secret.encode()).decode() != self.public:
            raise WireError(f"the secret key of the {self.role} does not belong to its public key: make new keys")

    def text(self) -> str:
        """What a key file holds. It is secret: for files of mode 0600 and the environment of a child only."""
        return msgspec.json.encode(
            _File(FORMAT, VERSION, self.role, self.public, self.secret, self.peer)  # type: ignore[arg-type]
        ).decode()


Security: TypeAlias = Keys | Literal["none"] | None
"""Keys; "none" for plain bytes anywhere, chosen by name; None for plain bytes that never leave this machine."""


def new_keys() -> tuple[Keys, Keys]:
    """Fresh keys of servers and of their clients, made for each other."""
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(2)]
    (server_public, server_secret), (client_public, client_secret) = pairs
    return (
        Keys("server", server_public, server_secret, client_public),
        Keys("client", client_public, client_secret, server_public),
    )


def key_paths(name: Path) -> tuple[Path, Path]:
    """Where `write_keys` puts the file of servers and that of clients."""
    return name.with_name(name.name + ".server"), name.with_name(name.name + ".client")


def write_keys(name: Path) -> tuple[Path, Path]:
    """Make keys and write NAME.server and NAME.client, readable by their owner only; never over a file."""
    paths = key_paths(name)
    written: list[Path] = []
    try:
        for path, keys in zip(paths, new_keys(), strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(path)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                os.fchmod(descriptor, 0o600)
                file.write(keys.text() + "\n")
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise WireError(f"{error.filename} is there already: remove it or choose another name") from error
        raise WireError(f"keys can't be written to {paths[0].parent}: {error.strerror}") from error
    return paths


def load_keys(path: Path, role: Role) -> Keys:
    """The keys in this file, which must be for this role."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WireError(f"the key file {path} can't be opened: {error.strerror}") from error
    try:
        _check_file(path, os.fstat(descriptor))
        text = os.read(descriptor, FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    return _parse(text, str(path), role)


def find_keys(role: Role) -> Keys | None:
    """The keys that the environment names or holds, if any."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    if given.lstrip().startswith("{"):
        return _parse(given.encode(errors="replace"), VARIABLE, role)
    return load_keys(Path(given), role)


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise WireError(f"{path} is not a file: give one that `bagpipe keys new` made")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise WireError(f"the key file {path} has mode {mode:04o}, others can use it: chmod 600 {path}")
    if status.st_uid not in (os.geteuid(), 0):
        raise WireError(f"the key file {path} belongs to user {status.st_uid}: use one of your own")


def _parse(text: bytes, source: str, role: Role) -> Keys:
    if len(text) > FILE_BYTES_MAX:
        raise WireError(f"{source} has over {FILE_BYTES_MAX} bytes: it is no key file")
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # from None: what was read may be a secret
        raise WireError(f"{source} is no key file of version {VERSION}: make one with `bagpipe keys new`") from None
    if file.role != role:
        raise WireError(f"{source} has the keys of a {file.role}: a {role} needs its own, made together with them")
    try:
        return Keys(file.role, file.public, file.secret, file.peer)
    except WireError as error:
        raise WireError(f"{source}: {error}") from None


def _check_key(name: str, key: str) -> None:
    try:
        fine = len(z85.decode(key)) == 32
    except (ValueError, KeyError, struct.error):
        fine = False
    if not fine:
        raise WireError(f"the {name} key is not one of 40 characters (Z85): make new keys")
