"""What is asked of the server, and how its answers are read: each operation once, for both clients.

An operation is a generator: it yields rounds of calls, is sent their replies and returns its result. It knows keys,
scripts and reply shapes, and neither sockets nor ``await``. Each part is a class on
:class:`accumulator.namespace.Namespace`; here they come together.
"""

from __future__ import annotations

from accumulator.attempts import Attempts
from accumulator.decisions import Decisions
from accumulator.envelope import Event
from accumulator.ladder_operations import LadderOperations
from accumulator.store import Operation
from accumulator.windows import Windows


class Operations(Windows, Attempts, Decisions, LadderOperations):
    """The operations on one namespace."""

    def find_event(self, bucket_key: str, event_id: str) -> Operation[Event | None]:
        """An event by its id, as last delivered: in the open window, a manifest that is kept, or the queue for
        reconciliation."""
        for entry in reversed((yield from self.open_events(bucket_key))):
            if entry.event.event_id == event_id:
                return entry.event
        for manifest in reversed((yield from self.manifests(bucket_key))):
            for entry in reversed(manifest.events):
                if entry.event.event_id == event_id:
                    return entry.event
        for item in reversed((yield from self.reconciliation())):
            if (item.event.bucket_key, item.event.event_id) == (bucket_key, event_id):
                return item.event
        return None
