"""Text of strangers, safe to show: what a terminal, a log or a page would act on becomes something to read (I8).

Names of tables, features and files, values of vocabularies and what peers and roles say may hold escape sequences,
which overwrite lines or fill a clipboard, and controls of direction, which show one text and mean another.
"""

from __future__ import annotations

import logging
import re
import sys

_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of terminals, all but tab and newline
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # direction, nothing
    "\ud800-\udfff\ufffe\uffff]"  # what can't be encoded, or no page may hold
)
_LINES = re.compile(r"[\t\n]")


def visible(text: str, *, lines: bool = True) -> str:
    """The text with what can't be seen written out as in Python; without `lines` tabs and newlines too."""
    text = _ACTIVE.sub(_written_out, text)
    return text if lines else _LINES.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


class VisibleFormatter(logging.Formatter):
    """Log records as text that is safe to show, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return visible(super().format(record))


def log_to_standard_error(*, force: bool = False) -> None:
    """Have the log of this process there, each record with its time; `force`: also if it goes elsewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=force)
