"""The janitor: writes ids and digests of settled windows that nobody was handed into their manifests, so that their
payloads may go when their time comes. What goes when is the closer's: it is a timer like any other.
"""

from __future__ import annotations

from typing import Final

from accumulator.role import Role


class Janitor(Role):
    """Records what no handler read: windows of flows with sink `none`, and those that were emptied."""

    name = "janitor"

    PAUSE: Final = 5.0
    """s between looks."""

    def step(self) -> None:
        found = self.perform(self.operations.unrecorded())
        for window_id in found:
            if self.stopping.is_set():
                return
            manifest = self.perform(self.operations.manifest(window_id))
            if manifest is not None:
                self.perform(self.operations.record(manifest))
        self.trouble.over()
        if not found:
            self.stopping.wait(self.PAUSE)

    def close(self) -> None:
        """It holds nothing."""
