"""The pulse: a worker's signs of life, from which others see that it runs and what it can do."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress

from accumulator.client import Accumulator
from accumulator.errors import AccumulatorError
from accumulator.handlers import registered, with_step_handler
from accumulator.health import BEAT, sign_of_life
from accumulator.role import Role


class Pulse(Role):
    """Tells every few seconds that a worker with these `roles` runs, which flows and ladders it has handlers for (those
    that are registered when this is made), and endpoints for (`webhooks`).

    It says nothing of a server that is away: the other roles do.
    """

    name = "pulse"

    def __init__(self, accumulator: Accumulator, roles: Iterable[str], webhooks: Iterable[str] = ()) -> None:
        super().__init__(accumulator)
        self._sign = sign_of_life(secrets.token_hex(6), roles, registered(), webhooks, with_step_handler())

    def step(self) -> None:
        with suppress(AccumulatorError):
            self.perform(self.operations.beat(self._sign))
        self.stopping.wait(BEAT)

    def close(self) -> None:
        with suppress(AccumulatorError):
            self.perform(self.operations.rest(self._sign))
