"""One exception tree for the whole package.

::

    AccumulatorError
    ├ InvalidInput (also a ValueError)   what was given breaks a rule; nothing was sent
    │  ├ InvalidEvent                    an event's field
    │  ├ InvalidPolicy                   a flow's option
    │  │  └ InvalidLadder                a ladder's option or step
    │  ├ InvalidSettings                 a setting, or an entry of the configuration file
    │  └ InvalidScenario                 a scenario file for `simulate`
    ├ UnknownFlow                        the flow has no policy, and there is no `default`
    ├ UnknownLadder                      there is no definition of that ladder
    ├ NamespaceMismatch                  other partition count, newer format, or test mode
    ├ ServerError                        the server did not do what was asked
    │  ├ ServerUnavailable               no answer: refused, timed out, closed
    │  │  └ AuthenticationFailed         wrong or missing password
    │  ├ ServerRefused                   an error reply that may pass (OOM, READONLY, LOADING …): retry
    │  └ MissingRight                    the user lacks a right on a command or key (NOPERM)
    ├ HandlerMissing                     a manifest has to be handled and nothing is registered for its flow
    └ InternalError                      an unknown reply of a script: a bug of ours

Outcomes of a push (`duplicate`, `conflict`, `rejected` …) are values, not exceptions. No message holds a
payload, a credential or a whole bucket key. Every exception can be pickled.
"""

from __future__ import annotations


class AccumulatorError(Exception):
    """Root of everything this package raises on purpose."""


class InvalidInput(AccumulatorError, ValueError):
    """Something given breaks a rule.

    `field` names what, `rule` says which rule in words, `index` is the position (from 0) in the list it came
    in, or None. The text reads ``event 3: occurred_at: must carry an offset``.
    """

    noun = "entry"

    def __init__(self, field: str, rule: str, index: int | None = None) -> None:
        super().__init__(field, rule, index)
        self.field = field
        self.rule = rule
        self.index = index

    def __str__(self) -> str:
        where = "" if self.index is None else f"{self.noun} {self.index}: "
        return f"{where}{self.field}: {self.rule}"


class InvalidEvent(InvalidInput):
    """An event breaks a rule of the envelope; `field` is the envelope's field, or the unknown one that was
    given."""

    noun = "event"


class InvalidPolicy(InvalidInput):
    """A policy is refused; `flow` ("" where it has no name yet) and `field` (the option) say where, `rule`
    why."""

    def __init__(self, flow: str, field: str, rule: str) -> None:
        super().__init__(field, rule)
        self.args = (flow, field, rule)
        self.flow = flow

    def __str__(self) -> str:
        flow = f"policy {self.flow}: " if self.flow else ""
        return f"{flow}{self.field}: {self.rule}"


class InvalidLadder(InvalidPolicy):
    """A ladder's definition is refused; `flow` is its name, `field` the option or step."""

    def __str__(self) -> str:
        return f"ladder {self.flow}: {self.field}: {self.rule}"


class InvalidSettings(InvalidInput):
    """A setting or an entry of the configuration file is refused; `field` is its name."""

    noun = "setting"


class InvalidScenario(InvalidInput):
    """A scenario can't be read; `index` is the step, counted from 0, where it is one. The text counts from 1."""

    def __str__(self) -> str:
        where = "" if self.index is None else f"step {self.index + 1}: "
        return f"{where}{self.field}: {self.rule}"


class UnknownFlow(AccumulatorError):
    """The flow has no policy of its own and there is no policy named `default`."""

    def __init__(self, flow: str) -> None:
        super().__init__(flow)
        self.flow = flow

    def __str__(self) -> str:
        return f"flow {self.flow}: there is no policy for it and none named 'default'; load one first"


class UnknownLadder(AccumulatorError):
    """There is no definition of a ladder of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"ladder {self.name}: there is no definition of it; load one first"


class NamespaceMismatch(AccumulatorError):
    """The namespace on the server was made with something this client can't go with; the message says what to
    do."""


class ServerError(AccumulatorError):
    """The server did not do what was asked."""


class ServerUnavailable(ServerError):
    """No answer from the server. What was sent may have been done: sending it again is safe."""


class AuthenticationFailed(ServerUnavailable):
    """The server wants a password or user name that was not given, or another one."""


class ServerRefused(ServerError):
    """The server answered with an error that may pass; `code` is its first word (OOM, READONLY, CLUSTERDOWN
    …)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return f"{self.code}: {self.args[1]}"


class MissingRight(ServerError):
    """The server's user may not run a command or touch a key; the message names it."""


class HandlerMissing(AccumulatorError):
    """A manifest, or a step of a ladder, needs a handler and no module that was loaded registers one for its flow, or
    its ladder (`flow` has its name); or the webhook role an endpoint (`what` it is that lacks)."""

    def __init__(self, flow: str, noun: str = "flow", what: str = "handler is registered") -> None:
        super().__init__(flow, noun, what)
        self.flow = flow
        self.noun = noun
        self.what = what

    def __str__(self) -> str:
        return f"{self.noun} {self.flow}: no {self.what} for it"


class InternalError(AccumulatorError):
    """A script answered in a way this release does not know: a bug, or scripts of another release."""
