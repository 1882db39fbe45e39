"""Who may talk to whom: addresses, keys, and the rule that plain bytes stay on this machine.

Between machines each side shows by TLS 1.3 that it holds its own secret key, and knows the certificate of the other; a
stolen file of a client can't play the server. Secrets come from files that only their owner can read or from the
environment, and show in no text that people see.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from bagpipe.errors import ConfigError, MissingExtraError, WireError

VARIABLE = "BAGPIPE_KEYS"
"""Environment variable: the path of a key file, or what is in it."""

Role = Literal["server", "client"]
FORMAT = "bagpipe-keys"
VERSION = 2
FILE_BYTES_MAX = 8192
DAYS = 365
"""How long new keys are good for."""
DAYS_MAX = 100 * 365
_EARLY = timedelta(days=1)
"""Clocks differ."""


class Address(NamedTuple):
    """A host, by name or number, and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether what is sent there can't leave this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> Address:
    """An address such as tcp://127.0.0.1:5555, 10.0.0.7:5555 or [::1]:5555."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or any(letter in bare for letter in "/[]@; ") or (":" in bare and bare == host):
        raise ConfigError(f"the address {text!r} is none: write tcp://HOST:PORT, an IPv6 host in brackets")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"the address {text!r} has the port {port!r}: give a number from 0 to 65535")
    return Address(bare, int(port))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a key file holds, as JSON."""

    format: Literal["bagpipe-keys"]
    version: Literal[2]
    role: Role
    certificate: str
    secret: str
    peer: str
    expires: Annotated[int, msgspec.Meta(ge=0, lt=1 << 36)]


@dataclass(frozen=True, slots=True)
class Keys:
    """One side's secret key and certificate, and the certificate of the other side, all as PEM."""

    role: Role
    certificate: str
    secret: str = field(repr=False)
    peer: str
    """For a server the certificate of its clients, for a client that of the servers."""
    expires: int
    """When both certificates do, in seconds since 1970."""

    def text(self) -> str:
        """What a key file holds. It is secret: for files of mode 0600 and the environment of a child only."""
        return msgspec.json.encode(
            _File(FORMAT, VERSION, self.role, self.certificate, self.secret, self.peer, self.expires)  # type: ignore[arg-type]
        ).decode()

    def is_peer(self, shown: bytes | None) -> bool:
        """Whether a certificate (DER) is that of the other side."""
        return shown is not None and hmac.compare_digest(shown, ssl.PEM_cert_to_DER_cert(self.peer))


Security: TypeAlias = Keys | Literal["none"] | None
"""Keys; "none" for plain bytes anywhere, chosen by name; None for plain bytes that never leave this machine."""


def check_security(address: Address, role: Role, security: Security) -> None:
    """Refuse plain bytes off this machine unless they were chosen by name, and keys that are for the other side."""
    if isinstance(security, Keys):
        if security.role != role:
            raise ConfigError(f"the keys are those of a {security.role}: a {role} needs its own")
    elif security is None and not address.is_local:
        raise ConfigError(
            f"{address} is not on this machine and there are no keys: make some with `bagpipe keys new` and name the "
            f'{role}\'s file in {VARIABLE}, or choose plain bytes with wire.security = "none" or, for '
            "`bagpipe server`, --security none"
        )
    elif security not in (None, "none"):
        raise ConfigError(f'security is {security!r}: give keys, "none" or None')


def tls_context(keys: Keys) -> ssl.SSLContext:
    """TLS 1.3 with these keys, which trusts the other side's certificate alone; WireError if they are bad."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if keys.role == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a certificate is compared as a whole, whatever the name of its host
    context.verify_mode = ssl.CERT_REQUIRED
    if keys.role == "server":
        context.num_tickets = 0  # sessions are never resumed
    try:
        context.load_verify_locations(cadata=keys.peer)
        with _as_file(f"{keys.secret}\n{keys.certificate}") as path:
            context.load_cert_chain(path, password="")  # else it would ask for one on the terminal
        ssl.PEM_cert_to_DER_cert(keys.peer)  # one certificate, and nothing else
    except (ssl.SSLError, ValueError, TypeError):
        # from None: what was read may be a secret
        raise WireError(
            f"the secret key of the {keys.role} does not belong to its certificate, or one of them is damaged: "
            "make new keys with `bagpipe keys new`"
        ) from None
    return context


def new_keys(days: int = DAYS) -> tuple[Keys, Keys]:
    """Fresh keys of servers and of their clients, made for each other."""
    expires = datetime.now(UTC) + timedelta(days=days)
    server_certificate, server_secret = _new_pair("bagpipe-server", expires)
    client_certificate, client_secret = _new_pair("bagpipe-client", expires)
    at = int(expires.timestamp())
    return (
        Keys("server", server_certificate, server_secret, client_certificate, at),
        Keys("client", client_certificate, client_secret, server_certificate, at),
    )


def _new_pair(name: str, expires: datetime) -> tuple[str, str]:
    """A certificate that signs itself, and its secret key."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise MissingExtraError("new keys need the cryptography package: pip install 'bagpipe[cluster]'") from error
    secret = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), expires) - _EARLY)
        .not_valid_after(expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(secret, None)
    )
    text = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), text.decode()


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A secret where OpenSSL, which reads files alone, finds it: in memory, or in a file that is ours alone."""
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):  # noqa: PTH110
        with tempfile.NamedTemporaryFile("w", prefix="bagpipe-") as file:  # mode 0600
            file.write(text)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("bagpipe-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def key_paths(name: Path) -> tuple[Path, Path]:
    """Where `write_keys` puts the file of servers and that of clients."""
    return name.with_name(name.name + ".server"), name.with_name(name.name + ".client")


def write_keys(name: Path, days: int = DAYS) -> tuple[Path, Path]:
    """Make keys and write NAME.server and NAME.client, readable by their owner only; never over a file."""
    if not 1 <= days <= DAYS_MAX:
        raise ConfigError(f"keys for {days} days: give 1 to {DAYS_MAX}")
    if name.name in ("", ".."):
        raise ConfigError(f"keys in files that begin with '{name}': give a name for them too, such as {name / 'run'}")
    paths, pair = key_paths(name), new_keys(days)
    written: list[Path] = []
    try:
        for path, keys in zip(paths, pair, strict=True):
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
    if not _is_there(given):  # from here on it is no path that may be shown: keys that something was put before look so
        raise WireError(f"{VARIABLE} names no file, and holds no keys: give the path of a key file, or what is in it")
    return load_keys(Path(given), role)


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name
        return False


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # from None: what was read may be a secret
        raise WireError(f"{source} is no key file of version {VERSION}: make one with `bagpipe keys new`") from None
    if file.role != role:
        raise WireError(f"{source} has the keys of a {file.role}: a {role} needs its own, made together with them")
    keys = Keys(file.role, file.certificate, file.secret, file.peer, file.expires)
    try:
        tls_context(keys)
    except WireError as error:
        raise WireError(f"{source}: {error}") from None
    if keys.expires < time.time():
        when = datetime.fromtimestamp(keys.expires, UTC).date()
        raise WireError(f"the keys in {source} have expired on {when}: make new ones with `bagpipe keys new`")
    return keys
