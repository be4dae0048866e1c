"""The janitor: writes ids and digests of settled windows that nobody was handed into their manifests, so that their
payloads may go when their time comes. What goes when is the closer's: it is a timer like any other.
"""

from __future__ import annotations

from typing import Final

from accumulator.errors import AccumulatorError, ServerError
from accumulator.role import Role


class Janitor(Role):
    """Records what no handler read: windows of flows with sink `none`, those that were emptied, and what a person
    settled. One that can't be read keeps its payloads, and is said once."""

    name = "janitor"

    PAUSE: Final = 5.0
    """s between looks."""
    LOOK: Final = 100
    """Manifests of each partition looked at in one go."""
    _told = 0

    def step(self) -> None:
        done, odd = 0, 0
        found = self.perform(self.operations.unrecorded(self.LOOK))
        for window_id in found:
            if self.stopping.is_set():
                return
            if self._record(window_id):
                done += 1
            else:
                odd += 1
        if odd > self._told:
            self.log.error("manifests_unreadable", manifests=odd)
        self._told = odd
        self.trouble.over()
        if not done:
            self.stopping.wait(self.PAUSE)

    def _record(self, window_id: str) -> bool:
        try:
            manifest = self.perform(self.operations.manifest(window_id))
            if manifest is None:
                return False
            self.perform(self.operations.record(manifest))
        except ServerError:
            raise
        except AccumulatorError:
            return False
        return True

    def close(self) -> None:
        """It holds nothing."""
