"""`bagpipe checkpoint`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagpipe.cli.output import AsJson, console, errors, print_json, print_pairs, print_rows, progress
from bagpipe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from bagpipe.checkpoint.directory import Checkpoints
    from bagpipe.checkpoint.point import Checkpoint
    from bagpipe.optim import RowOptimizer

app = typer.Typer(
    help="Look at checkpoints, verify them, export them, import rows of others and remove old ones.",
    no_args_is_help=True,
)

Place = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="Of a run, of checkpoints, or of one checkpoint.", show_default=False),
]
Done = Annotated[
    int | None, typer.Option(min=0, help="The checkpoint after so many iterations. Default: the last one.")
]
OneOfThem = Annotated[
    int | None, typer.Option("--done", min=0, help="Only that after so many iterations, and its bases.")
]
Destination = Annotated[
    Path, typer.Argument(help="A file for safetensors, a new directory for parquet.", show_default=False)
]
State = Annotated[bool, typer.Option(help="Parquet: what the optimizer keeps of each row too.")]
Keep = Annotated[int, typer.Option(min=1, help="How many of the last ones stay, with all that they build on.")]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Files of rows, parquet or safetensors, or directories of them. NAME=PATH names the table of a file, or "
        "makes one table of all parquet files in a directory.",
        show_default=False,
    ),
]
Created = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Of the new checkpoint.", show_default=False)]
Optimizers = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer",
        metavar="[TABLE=]NAME",
        help="The row optimizer that will train the rows: sgd, momentum, adagrad, rowwise_adagrad, adam, adamw, or "
        "frozen; of all tables, or of one. Default: sgd, which keeps nothing of a row.",
    ),
]
FirstSum = Annotated[
    float, typer.Option("--initial-accumulator-value", help="What adagrad and rowwise_adagrad begin with.")
]
Renamed = Annotated[
    list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="What the model calls a table of the files.")
]
AnyIds = Annotated[
    list[str] | None, typer.Option("--any-id", metavar="TABLE", help="A table that takes any 64-bit id.")
]


class Format(StrEnum):
    """What checkpoints can be exported to."""

    safetensors = "safetensors"
    parquet = "parquet"


ToFormat = Annotated[Format, typer.Option("--format", help="Plain weights of the model, or a table of its rows.")]


@app.command("list")
def list_checkpoints(place: Place, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first."""
    checkpoints, _ = _find(place)
    rows = [
        {
            **({"done": found.done} if found.checkpoint is None else _described(found.checkpoint)),
            "problem": found.problem,
        }
        for found in checkpoints.scan()
    ]
    if as_json:
        print_json({"directory": str(checkpoints.directory), "checkpoints": rows})
        return
    if not rows:
        console.print(f"{checkpoints.directory} holds no checkpoints", soft_wrap=True)
        return
    print_rows(str(checkpoints.directory), rows)


@app.command("verify")
def verify(place: Place, done: OneOfThem = None, as_json: AsJson = False) -> None:
    """Read every byte of one checkpoint, or of all, and compare checksums; exit code 1 if one is damaged."""
    checkpoints, named = _find(place)
    wanted = done if done is not None else named
    if wanted is not None:
        rows = [_verified(checkpoints.open(wanted), {}, chain=True)]
    else:
        rows = []
        problems: dict[int, str] = {}
        for found in checkpoints.scan():
            if found.checkpoint is None:
                rows.append({"done": found.done, "ok": False, "problem": found.problem})
            else:
                rows.append(_verified(found.checkpoint, problems, chain=False))
    if not rows:
        raise CheckpointError(f"{checkpoints.directory} holds no checkpoints: check the path")
    ok = all(row["ok"] for row in rows)
    if as_json:
        print_json({"directory": str(checkpoints.directory), "ok": ok, "checkpoints": rows})
    else:
        print_rows(str(checkpoints.directory), rows)
    if not ok:
        raise typer.Exit(1)


@app.command("show")
def show(place: Place, done: Done = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: tables, files, and what the run told of itself."""
    import msgspec

    checkpoint = _open(place, done)
    manifest = checkpoint.manifest
    if as_json:
        print_json({"directory": str(checkpoint.directory), "chain": checkpoint.chain, **msgspec.to_builtins(manifest)})
        return
    facts = {
        **_described(checkpoint),
        "builds on": _numbers(checkpoint.chain[:-1]),
        "bagpipe": manifest.bagpipe,
        "trainers": manifest.trainers,
        "servers": manifest.servers,
        "data": manifest.data or None,
        "vocabulary": ", ".join(entry.path for entry in manifest.vocabulary) or None,
        "config_sha256": manifest.config_sha256,
    }
    print_pairs(str(checkpoint.directory), facts)
    counts = checkpoint.num_rows()
    print_rows(
        "tables",
        [
            {
                "table": table.name,
                "ids below": table.rows,
                "vectors": " + ".join(map(str, table.dims)),
                "floats a row": table.width,
                "optimizer": table.optimizer,
                "rows in files": count,
            }
            for table, count in zip(manifest.tables, counts, strict=True)
        ],
    )
    print_rows("files", [{"file": entry.name, "bytes": entry.bytes, "rows": _rows(entry)} for entry in manifest.files])


@app.command("export")
def export(
    place: Place,
    destination: Destination,
    done: Done = None,
    to: ToFormat = Format.safetensors,
    state: State = True,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as plain PyTorch weights, or its rows as parquet."""
    from bagpipe.checkpoint.export import export_checkpoint

    checkpoint = _open(place, done)
    files = export_checkpoint(checkpoint, destination, format=to.value, state=state)
    if as_json:
        print_json({"done": checkpoint.done, "format": to.value, "files": [str(path) for path in files]})
        return
    for path in files:
        console.print(str(path), soft_wrap=True)


@app.command("import")
def import_(
    sources: Sources,
    directory: Created,
    optimizer: Optimizers = None,
    initial_accumulator_value: FirstSum = 0.0,
    rename: Renamed = None,
    any_id: AnyIds = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of rows that others have trained, which bagpipe train --init-from begins with."""
    from bagpipe.checkpoint.importing import import_rows

    if initial_accumulator_value and not any(text.endswith("adagrad") for text in optimizer or ()):
        raise ConfigError("--initial-accumulator-value is for Adagrad: give --optimizer adagrad or rowwise_adagrad too")
    given = dict(_optimizer(text, initial_accumulator_value) for text in ("sgd", *(optimizer or ())))
    default = given.pop("")
    checkpoint, tables, left_out = import_rows(
        sources, directory, optimizer=default, optimizers=given, renamed=dict(map(_new_name, rename or ())),
        any_ids=any_id or (),
    )  # fmt: skip
    rows = [
        {
            "table": table.name,
            "rows": table.rows_done,
            "ids below": entry.rows,
            "vectors": " + ".join(map(str, table.dims)),
            "optimizer": entry.optimizer,
            "state": "from the file" if any(file.state_width for file in table.files) else "of new rows",
            "not finite": table.rows_not_finite,
        }
        for table, entry in zip(tables, checkpoint.manifest.tables, strict=True)
    ]
    if as_json:
        print_json({"checkpoint": str(checkpoint.directory), "tables": rows, "left_out": left_out})
        return
    print_rows(str(checkpoint.directory), rows)
    for name in left_out:
        errors.print(f"left out, since it is no table: {name}")
    for table in tables:
        if table.rows_not_finite:
            errors.print(
                f"table {table.name!r}: {table.rows_not_finite:,} rows have NaN or infinite numbers, and are kept as "
                "they are: a batch with one of them can't be trained; mend the files if that is not meant"
            )


@app.command("prune")
def prune(place: Place, keep: Keep = 3, as_json: AsJson = False) -> None:
    """Remove all but the last few checkpoints and what they build on, once the newest one is verified."""
    checkpoints, _ = _find(place)
    checkpoints.keep = keep
    removed = list(checkpoints.prune())
    kept = [checkpoint.done for checkpoint in checkpoints.list()]
    if as_json:
        print_json({"directory": str(checkpoints.directory), "removed": removed, "kept": kept})
        return
    print_pairs("", {"directory": checkpoints.directory, "removed": _numbers(removed), "kept": _numbers(kept)})


def _optimizer(text: str, initial_accumulator_value: float) -> tuple[str, RowOptimizer]:
    """A table, or "" for all, and its row optimizer."""
    from bagpipe import optim

    table, _, name = text.rpartition("=")
    if name == optim.Frozen.name:
        return table, optim.Frozen()
    has_sum = "initial_accumulator_value" in getattr(optim.NAMES.get(name), "settings", ())
    return table, optim.build(
        name, lr=1.0, **({"initial_accumulator_value": initial_accumulator_value} if has_sum else {})
    )


def _new_name(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not (old and new):
        raise ConfigError(f"--rename {text!r} is not of the form OLD=NEW: give the name in the file and the new one")
    return old, new


def _find(place: Path) -> tuple[Checkpoints, int | None]:
    """The directory of checkpoints that a path means, and the one that it names, if it does."""
    from bagpipe.checkpoint.directory import Checkpoints
    from bagpipe.checkpoint.manifest import MANIFEST

    place = place.absolute()
    if not place.is_dir():
        raise CheckpointError(f"{place} is not a directory: give that of a run, of checkpoints, or of one checkpoint")
    if (place / MANIFEST).is_file() and place.name.isdecimal():
        return Checkpoints(place.parent), int(place.name)
    within = place / "checkpoints"
    return Checkpoints(within if within.is_dir() else place), None


def _open(place: Path, done: int | None) -> Checkpoint:
    checkpoints, named = _find(place)
    wanted = done if done is not None else named
    if wanted is not None:
        return checkpoints.open(wanted)
    latest = checkpoints.latest()
    if latest is None:
        raise CheckpointError(f"{checkpoints.directory} holds no checkpoint that can be opened: check the path")
    return latest


def _verified(checkpoint: Checkpoint, problems: dict[int, str], *, chain: bool) -> dict[str, Any]:
    """Whether a checkpoint is as it was written; `problems` has those of the ones that it may build on."""
    total = checkpoint.num_bytes if chain else checkpoint.manifest.num_bytes
    problem = next((problems[done] for done in checkpoint.chain if done in problems), None)
    try:
        with progress(max(1, total), f"verifying {checkpoint.directory.name}") as report:
            checkpoint.verify(report, chain=chain)
    except CheckpointError as error:
        problem = problems[checkpoint.done] = str(error)
    return {"done": checkpoint.done, "ok": problem is None, "bytes": total, "problem": problem}


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    base = checkpoint.manifest.base
    return {
        "done": checkpoint.done,
        "rows": "all" if base is None else f"since {base.done}",
        "bytes": checkpoint.manifest.num_bytes,
        "chain_bytes": checkpoint.num_bytes,
        "created": checkpoint.manifest.created_at,
    }


def _rows(entry: Any) -> int | None:
    return None if entry.rows is None else sum(part.rows for part in entry.rows)


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


@app.callback()
def _checkpoint() -> None:
    """Look at checkpoints, verify them, export them, import rows of others and remove old ones."""
