"""`bagpipe server`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bagpipe.cli.output import AsJson, console, print_json

Address = Annotated[str, typer.Option(help="Where to listen; port 0 lets the system choose.")]
Shard = Annotated[int, typer.Option(help="Which of the servers this is, counted from 0.")]
Of = Annotated[int, typer.Option(help="How many servers there are.")]
StoreKind = Annotated[str, typer.Option("--store", help="Where rows live: memory, or mapped (files).")]
Directory = Annotated[
    Path | None, typer.Option("--dir", help="For the files of a mapped store; else that of temporary files.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--keys", help="The server's file from `bagpipe keys new`; else that named in BAGPIPE_KEYS."),
]
SecurityKind = Annotated[
    str, typer.Option("--security", help="none: plain bytes to other machines too, for whoever can reach the port.")
]
MemoryMax = Annotated[str | None, typer.Option(help="Refuse rows beyond this, such as 8GB.")]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option("--checkpoints", help="Where trainers may have checkpoints, and below; may be repeated."),
]


def server(
    address: Address = "127.0.0.1:0",
    shard: Shard = 0,
    of: Of = 1,
    store: StoreKind = "memory",
    directory: Directory = None,
    keys: KeyFile = None,
    security: SecurityKind = "tls",
    memory_max: MemoryMax = None,
    checkpoints: Checkpoints = None,
    as_json: AsJson = False,
) -> None:
    """Hold rows for trainers until SIGTERM or Ctrl-C. With --json one line says when it is ready, and where."""
    import threading

    import msgspec

    from bagpipe.config import memory_bytes
    from bagpipe.server.process import Ready, ServerOptions, serve, stopped_by_signals
    from bagpipe.visible import log_to_standard_error

    log_to_standard_error()
    options = ServerOptions(
        address=address,
        server=shard,
        servers=of,
        store=_store(store),
        directory=None if directory is None else str(directory),
        memory_max=None if memory_max is None else memory_bytes("--memory-max", memory_max),
        checkpoints=tuple(str(path.resolve()) for path in checkpoints or ()),
    )
    chosen = _security(keys, security)

    def announce(ready: Ready) -> None:
        if as_json:
            print_json(msgspec.to_builtins(ready))
        else:
            console.print(f"server {ready.server} of {ready.servers} listens at {ready.address}")

    stop = threading.Event()
    with stopped_by_signals(stop):
        serve(options, chosen, announce, stop)


def _store(name: str) -> Literal["memory", "mapped"]:
    from bagpipe.errors import ConfigError

    if name == "memory":
        return "memory"
    if name == "mapped":
        return "mapped"
    raise ConfigError(f"--store is {name!r}: give memory or mapped")


def _security(keys: Path | None, security: str) -> Any:
    """Keys, "none", or None for this machine only."""
    from bagpipe.errors import ConfigError
    from bagpipe.wire.keys import find_keys, load_keys

    if security not in ("tls", "none"):
        raise ConfigError(f"--security is {security!r}: give tls or none")
    if security == "none":
        if keys is not None:
            raise ConfigError(f"--keys {keys} and --security none contradict each other: give one of them")
        return "none"
    return load_keys(keys, "server") if keys is not None else find_keys("server")
