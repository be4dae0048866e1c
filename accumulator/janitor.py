"""The janitor: writes ids and digests of settled windows that nobody was handed into their manifests, so that their
payloads may go when their time comes. What goes when is the closer's: it is a timer like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from accumulator.errors import ServerError
from accumulator.manifest import Manifest
from accumulator.role import Role
from accumulator.store import together


class Janitor(Role):
    """Records what no handler read: windows of flows with sink `none`, those that were emptied, and what a person
    settled. One that can't be read keeps its payloads, and is said once."""

    name = "janitor"

    PAUSE: Final = 5.0
    """s between looks."""
    LOOK: Final = 100
    """Manifests of each partition looked at in one go."""
    BATCH: Final = 20
    """Manifests that are read at a time, with their payloads."""
    _told = 0

    def step(self) -> None:
        done, odd = 0, 0
        found = self.perform(self.operations.unrecorded(self.LOOK))
        for i in range(0, len(found), self.BATCH):
            if self.stopping.is_set():
                return
            some = found[i : i + self.BATCH]
            recorded = self._record(some)
            done += recorded
            odd += len(some) - recorded
        if odd > self._told:
            self.log.error("manifests_unreadable", manifests=odd)
        self._told = odd
        self.trouble.over()
        if not done:
            self.stopping.wait(self.PAUSE)

    def _record(self, window_ids: Sequence[str]) -> int:
        """How many of them could be read and written. Raises ServerError."""
        read = self.perform(together(map(self.operations.manifest, window_ids)))
        manifests = [manifest for manifest in read if isinstance(manifest, Manifest)]
        written = self.perform(together(map(self.operations.record, manifests)))
        away = next((problem for problem in (*read, *written) if isinstance(problem, ServerError)), None)
        if away is not None:
            raise away
        return sum(problem is None for problem in written)

    def close(self) -> None:
        """It holds nothing."""
