"""The Lua scripts, joined from their parts when they are first asked for.

A script names its parts in a header line ``-- parts: clock, window``; the parts stand before its own body, in that
order. The first line (``#!lua flags=…``) tells the server how to treat the script; a fake server does not know it, so
:attr:`Script.plain` leaves it out and is otherwise the same text.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files

NAMES = (
    "accept",
    "aside",
    "beat",
    "begin",
    "decide",
    "effect",
    "flush",
    "hold",
    "load_policy",
    "move_ladder",
    "number_policy",
    "record",
    "reserve",
    "resolve",
    "retract",
    "settle",
    "show",
    "stage",
    "start_ladder",
    "take",
    "tick",
    "watch",
)


def read(name: str) -> str:
    """The text of one file of ``lua/``, a script or a part."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    """One atomic operation on the server, run by the SHA-1 of its text."""

    name: str
    source: str
    sha: str

    @cached_property
    def plain(self) -> str:
        """The same text without its first line."""
        return self.source.partition("\n")[2]

    @cached_property
    def plain_sha(self) -> str:
        return _sha(self.plain)


def _sha(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@lru_cache
def script(name: str) -> Script:
    """The script of that name, whole."""
    text = read(name)
    shebang, _, body = text.partition("\n")
    declared = re.search(r"^-- parts: (.+)$", body, re.MULTILINE)
    parts = [part.strip() for part in declared.group(1).split(",")] if declared else []
    source = "\n".join([shebang, *(read(part) for part in parts), body])
    return Script(name, source, _sha(source))
