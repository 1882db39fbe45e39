"""`bagpipe.prepare` with its settings side by side, and stages that a test drives."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import bagpipe
from bagpipe.world import World

OF_CACHE = {"cache": "size", "lookahead": "lookahead", "policy": "policy", "policy_options": "options"}
OF_OPTIONS = ("device", "seed", "initial", "keep", "threads", "depth", "check")


def settings(**flat):
    """What `bagpipe.prepare` takes: the parts of `Cache`, `Files` and `Options` by names of their own."""
    cache = {name: flat.pop(ours) for ours, name in OF_CACHE.items() if ours in flat}
    options = {name: flat.pop(name) for name in OF_OPTIONS if name in flat}
    if "store_memory" in flat:
        place = flat.pop("store", None)
        flat["store"] = bagpipe.Files(None if place == "mapped" else place, flat.pop("store_memory"))
    if cache:
        flat["cache"] = bagpipe.Cache(**cache)
    if options:
        flat["options"] = bagpipe.Options(**options)
    return flat


def prepare(model, optimizer, loader, rows=None, *, driver=None, **flat):
    """What `bagpipe.prepare` gives; the stages are run by `driver`, if one is given."""
    driven = nullcontext() if driver is None else patch.object(World, "driver", lambda _: driver)
    with driven:
        return bagpipe.prepare(model, optimizer, loader, rows=rows, **settings(**flat))
