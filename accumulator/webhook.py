"""The sink `webhook`: hands manifests over as signed HTTP requests.

POST, with a JSON object as its body: ``window_id``, ``bucket_key``, ``attempt`` and ``manifests``, a list of what is
handed over, the oldest first: one manifest, or all that waited (``handover: together``); the last is the one that
``window_id`` names. Each has its ``close_reason``, its ``relation`` to the window before and its ``events`` in order of
acceptance; an event's ``late``, ``revised`` and ``reconciled`` are flags, ``order`` is its place (from 1) by the flow's
``order_by`` among all that are handed over, and ``gap`` says that its source's version before it is missing.
``previous_state`` is what became of the bucket's manifest before these. There are no checkpoints: a webhook can leave
none. What a ladder emitted is an object with ``ladder``, ``event``, ``step``, ``attributes``, ``args``
and more, under the step's idempotency key. Instants are in ms; a payload of bytes is base64 in ``payload_bytes``.

Headers: ``Idempotency-Key`` (the window id: the same in each attempt), ``Accumulator-Attempt``,
``Accumulator-Timestamp`` (seconds) and ``Accumulator-Signature``: ``v1=`` and the hex HMAC-SHA256, under the secret, of
``<timestamp>.<body>``; :func:`check_signature` is for the receiving side. 2xx confirms; 409 and 410 are permanent; any
other answer, and none, is tried again: up to MAX_ATTEMPTS, with pauses of up to 30 min, some 3 h in all. Redirects are
not followed. Where a host has an address that is not public, nothing is sent, unless the endpoint allows it: an address
that the configuration names is refused at the start, one that a name leads to ends the manifest (``NotAllowed``).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from time import monotonic, time
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx
import orjson

from accumulator.client import Accumulator
from accumulator.context import Context, StepContext
from accumulator.emission import Emission
from accumulator.envelope import MISSING
from accumulator.errors import HandlerMissing, InvalidSettings
from accumulator.handlers import DEFAULT, Handler, PermanentError
from accumulator.manifest import Manifest, StoredEvent
from accumulator.runner import DirectRunner
from accumulator.settings import WebhookSink
from accumulator.turns import InFlight

PERMANENT: Final = frozenset({409, 410})
MAX_ATTEMPTS: Final = 20
BACKOFF: Final = 1_000
MAX_BACKOFF: Final = 1_800_000
"""ms: pauses double from the one to the other, each anywhere between none and all of it."""
MIN_SECRET: Final = 16

_NOT_PUBLIC: Final = "that is not public: allow it with private: true"
_SMALL: Final = 4096
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[..., Sequence[tuple[Any, ...]]]


class Declined(PermanentError):
    """The other side wants it no more (409, 410): no retry will help."""


class NotAllowed(PermanentError):
    """The host is none that the endpoint may reach."""


class Failed(Exception):
    """It did not work this time."""


@dataclass(frozen=True)
class Endpoint:
    """Where a flow's manifests go. `secret` signs; `timeout` is in ms; `private` allows addresses that are not
    public."""

    url: str = field(repr=False)
    secret: str = field(repr=False)
    timeout: int = 10_000
    private: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSettings("url", "must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise InvalidSettings("url", "must hold no user or password")
        if len(self.secret) < MIN_SECRET:
            raise InvalidSettings("secret", f"must be at least {MIN_SECRET} characters")

    @classmethod
    def of(cls, flow: str, sink: WebhookSink) -> Self:
        """What the configuration says of a flow, with the secret that the environment holds. Raises InvalidSettings,
        also for a host that is plainly not public; what a name leads to shows only when it is sent to."""
        try:
            made = cls(sink.url, sink.secret(), sink.timeout, sink.private)
            if not (made.private or _may_be_public(urlsplit(made.url).hostname or "")):
                raise InvalidSettings("url", f"names a host {_NOT_PUBLIC}")
            return made
        except InvalidSettings as problem:
            raise InvalidSettings(f"sinks.{flow}.{problem.field}", problem.rule) from None


# --- the request ------------------------------------------------------------------------------------------------------


Places = Mapping[int, tuple[int, bool]]
"""id() of an entry → its place in order, and whether it follows a gap."""


def _event(entry: StoredEvent, places: Places) -> dict[str, Any]:
    given = entry.event
    told: dict[str, Any] = {
        "event_id": given.event_id,
        "kind": given.kind,
        "occurred_at": given.occurred_ms,
        "received_at": entry.received_at,
        "position": entry.position,
        "source": given.source,
        "source_version": given.source_version,
        "policy_version": given.policy_version,
        "deadline_at": given.deadline_ms,
        "weight": given.weight,
        "ref": given.ref,
        "content_key": given.content_key,
        "trace": given.trace,
        "content_digest": given.content_digest,
        "late": entry.late,
        "revised": entry.revised,
        "reconciled": entry.reconciled,
    }
    if isinstance(given.payload, bytes):
        told["payload_bytes"] = b64encode(given.payload).decode()
    elif given.payload is not MISSING:
        told["payload"] = given.payload
    if id(entry) in places:
        told["order"], told["gap"] = places[id(entry)]
    return told


def _manifest(manifest: Manifest, places: Places) -> dict[str, Any]:
    names = (
        *("window_id", "window_version", "opened_at", "closed_at", "close_reason", "relation", "previous_window_id"),
        *("first_event_at", "last_event_at", "event_count", "duplicates", "policy_version", "policy_versions"),
        *("event_ids", "late_event_ids", "revised_event_ids", "retracted_event_ids", "digest"),
    )
    return {name: getattr(manifest, name) for name in names} | {
        "events": [_event(entry, places) for entry in manifest.events]
    }


def body_of(manifests: Sequence[Manifest], ctx: Context | None = None) -> bytes:
    """The body for what is handed over in one call, the oldest first; with what its context adds: the events' order and
    what became of the manifest before."""
    last = manifests[-1]
    told: dict[str, Any] = {"window_id": last.window_id, "bucket_key": last.bucket_key, "attempt": last.attempt}
    places: Places = {}
    if ctx is not None:
        places = {id(each.entry): (place, each.gap) for place, each in enumerate(ctx.in_order(), 1)}
        told["previous_state"] = ctx.predecessor_state
    return orjson.dumps(told | {"manifests": [_manifest(manifest, places) for manifest in manifests]})


def emission_body(emission: Emission) -> bytes:
    """The body for what a ladder emitted."""
    names = (
        *("emission_id", "ladder", "ladder_id", "bucket_key", "event", "step", "attributes", "args", "anchor_at"),
        *("due_at", "emitted_at", "start_id", "by_event", "reason", "attempt"),
    )
    return orjson.dumps({name: getattr(emission, name) for name in names})


def sign(secret: str, timestamp: int, body: bytes) -> str:
    """The signature of a body sent at `timestamp` (s)."""
    return "v1=" + hmac.new(secret.encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()


def check_signature(secret: str, headers: Mapping[str, str], body: bytes, tolerance: int = 300) -> bool:
    """For the receiving side: whether the headers sign this body, not longer ago than `tolerance` s."""
    given = {name.lower(): value for name, value in headers.items()}
    stamp = given.get("accumulator-timestamp", "")
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12) or abs(time() - int(stamp)) > tolerance:
        return False
    wanted = sign(secret, int(stamp), body)
    return hmac.compare_digest(wanted.encode(), given.get("accumulator-signature", "").encode())


def new_secret() -> str:
    """A secret to sign with."""
    return secrets.token_urlsafe(32)


# --- where it goes ----------------------------------------------------------------------------------------------------


def _is_public(address: Address) -> bool:
    """Whether an address leads to the Internet and to one host, also where it holds an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return _is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _may_be_public(host: str) -> bool:
    """Whether that can't be ruled out without asking what the name resolves to."""
    try:
        return _is_public(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host.rstrip(".") != "localhost"


def public_addresses(host: str, port: int, resolve: Resolve = socket.getaddrinfo) -> list[str]:
    """The host's addresses, in the order to try. Raises NotAllowed where one of them is not public: a name must not
    lead inside; Failed where there is none."""
    try:
        found = list(dict.fromkeys(str(info[4][0]) for info in resolve(host, port, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise Failed("the host's name can't be resolved")
    for address in found:
        if not _is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise NotAllowed(f"the host has an address {_NOT_PUBLIC}")
    return found


def deliver(
    endpoint: Endpoint,
    handed: Sequence[Manifest] | Emission,
    client: httpx.Client,
    resolve: Resolve = socket.getaddrinfo,
    ctx: Context | None = None,
) -> None:
    """Sends what is handed over, manifests with what their context adds. Raises Declined, NotAllowed or Failed; their
    texts hold neither payload nor secret."""
    until = monotonic() + endpoint.timeout / 1000
    url = httpx.URL(endpoint.url)
    targets = [url]
    extensions = {}
    if not endpoint.private:
        # Connected to is what was checked, whatever the name resolves to a moment later; the certificate must be the
        # name's all the same.
        host = url.raw_host.decode()
        port = url.port or (443 if url.scheme == "https" else 80)
        targets = [url.copy_with(host=address) for address in public_addresses(host, port, resolve)]
        extensions = {"sni_hostname": host}
    stamp = int(time())
    if isinstance(handed, Emission):
        body, key, attempt = emission_body(handed), handed.key, handed.attempt
    else:
        body, key, attempt = body_of(handed, ctx), handed[-1].window_id, handed[-1].attempt
    headers = {
        "Host": url.netloc.decode(),
        "Content-Type": "application/json",
        "Idempotency-Key": key,
        "Accumulator-Attempt": str(attempt),
        "Accumulator-Timestamp": str(stamp),
        "Accumulator-Signature": sign(endpoint.secret, stamp, body),
        "User-Agent": "event-accumulator",
    }
    problem = ""
    for target in targets:
        try:
            status = _post(client, target, body, headers, max(0.001, until - monotonic()), extensions)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            problem = type(error).__name__  # nothing was sent: another address may do
            continue
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Failed(type(error).__name__) from None
        if status in PERMANENT:
            raise Declined(f"HTTP {status}")
        if not 200 <= status < 300:
            raise Failed(f"HTTP {status}")
        return
    raise Failed(problem)


def _post(
    client: httpx.Client,
    url: httpx.URL,
    body: bytes,
    headers: Mapping[str, str],
    seconds: float,
    extensions: dict[str, Any],
) -> int:
    with client.stream("POST", url, content=body, headers=headers, timeout=seconds, extensions=extensions) as response:
        # A short answer is read, so that the connection can be used again; of any other only the status counts.
        length = response.headers.get("Content-Length", "0" if response.status_code == 204 else "")
        if length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= _SMALL:
            for _ in response.iter_raw():
                continue
        return response.status_code


@lru_cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def new_client() -> httpx.Client:
    """A client for one endpoint (connections are told apart by address, not by name) that follows no redirect and reads
    no proxy or credentials from the environment."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.Client(follow_redirects=False, trust_env=False, verify=_certificates(), limits=limits)


# --- the role ---------------------------------------------------------------------------------------------------------


class WebhookRunner(DirectRunner):
    """Posts manifests from `threads` threads of this process: the sink ``webhook``.

    `endpoints` maps flows, and ``default`` for all that have none of their own, to where they go. Attempts, leases and
    timeouts are as the direct runner's: what runs here as the handler is the request. One that trickles on beyond its
    timeout is left behind after SLACK ms more.
    """

    SLACK: Final = 5_000

    name = "webhook"
    sink = "webhook"

    def __init__(
        self,
        accumulator: Accumulator,
        endpoints: Mapping[str, Endpoint],
        threads: int = 4,
        grace: float = 2.5,
        in_flight: InFlight | None = None,
    ) -> None:
        super().__init__(accumulator, threads, grace, in_flight)
        self._clients = {flow: new_client() for flow in endpoints}
        self._handlers = {
            flow: Handler(
                flow=flow,
                function=partial(_hand_over, endpoint, self._clients[flow]),
                stages=None,
                max_attempts=MAX_ATTEMPTS,
                timeout=endpoint.timeout + self.SLACK,
                backoff=BACKOFF,
                max_backoff=MAX_BACKOFF,
                approval_limit=0,
            )
            for flow, endpoint in endpoints.items()
        }

    def find(self, flow: str) -> Handler:
        found = self._handlers.get(flow) or self._handlers.get(DEFAULT)
        if found is None:
            raise HandlerMissing(flow, what="endpoint is configured")
        return found

    def find_step(self, emission: Emission) -> Handler:
        return self.find(emission.flow)

    def close(self) -> None:
        super().close()
        for client in self._clients.values():
            client.close()


def _hand_over(endpoint: Endpoint, client: httpx.Client, ctx: Context | StepContext) -> None:
    try:
        if isinstance(ctx, StepContext):
            deliver(endpoint, ctx.emission, client)
        else:
            deliver(endpoint, ctx.manifests, client, ctx=ctx)
    finally:
        client.cookies.clear()  # one answer says nothing to the next request
