"""The sink `webhook`: hands manifests over as signed HTTP requests.

The body is the manifest with its events as JSON. Headers: ``Idempotency-Key`` (window id), ``Accumulator-Attempt``,
``Accumulator-Timestamp`` (seconds) and ``Accumulator-Signature``: ``v1=`` and the hex HMAC-SHA256, under the secret, of
``<timestamp>.<body>``. 2xx confirms; 409 and 410 are permanent; anything else is retried. Redirects are not followed.
An address that is not public is refused, unless allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import time
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import orjson

from accumulator.envelope import MISSING
from accumulator.errors import InvalidSettings
from accumulator.manifest import Manifest

PERMANENT: Final = frozenset({409, 410})


@dataclass(frozen=True)
class Endpoint:
    """Where a flow's manifests go. `secret` signs; `timeout` is in ms; `private` allows addresses that are not
    public."""

    url: str
    secret: str
    timeout: int = 10_000
    private: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSettings("webhook", "url must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise InvalidSettings("webhook", "url must not hold a user or password")
        if len(self.secret) < 16:
            raise InvalidSettings("webhook", "secret must be at least 16 characters")

    def __repr__(self) -> str:
        return f"<Endpoint {urlsplit(self.url).hostname}>"


class Refused(Exception):
    """The other side, or we, refuse for good: no retry will help."""


class Failed(Exception):
    """It did not work this time."""


def body_of(manifest: Manifest) -> bytes:
    """A manifest with its events, as it is sent: instants in ms, payloads as they went in (bytes as base64)."""

    def event(entry: Any) -> dict[str, Any]:
        given = entry.event
        told: dict[str, Any] = {
            "event_id": given.event_id,
            "kind": given.kind,
            "occurred_at": given.occurred_ms,
            "received_at": entry.received_at,
            "source": given.source,
            "source_version": given.source_version,
            "policy_version": given.policy_version,
            "weight": given.weight,
            "ref": given.ref,
            "trace": given.trace,
            "late": entry.late,
            "revised": entry.revised,
        }
        if isinstance(given.payload, bytes):
            told["payload_bytes"] = b64encode(given.payload).decode()
        elif given.payload is not MISSING:
            told["payload"] = given.payload
        return told

    return orjson.dumps(
        {
            "window_id": manifest.window_id,
            "bucket_key": manifest.bucket_key,
            "window_version": manifest.window_version,
            "opened_at": manifest.opened_at,
            "closed_at": manifest.closed_at,
            "close_reason": manifest.close_reason,
            "relation": manifest.relation,
            "previous_window_id": manifest.previous_window_id,
            "event_ids": manifest.event_ids,
            "retracted_event_ids": manifest.retracted_event_ids,
            "digest": manifest.digest,
            "attempt": manifest.attempt,
            "events": [event(entry) for entry in manifest.events],
        }
    )


def sign(secret: str, timestamp: int, body: bytes) -> str:
    """The signature of a body sent at `timestamp` (s)."""
    return "v1=" + hmac.new(secret.encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()


def check_signature(secret: str, headers: Mapping[str, str], body: bytes, tolerance: int = 300) -> bool:
    """For the receiving side: whether the headers sign this body, not longer ago than `tolerance` s."""
    given = {name.lower(): value for name, value in headers.items()}
    stamp = given.get("accumulator-timestamp", "")
    if not stamp.isdigit() or abs(time() - int(stamp)) > tolerance:
        return False
    return hmac.compare_digest(sign(secret, int(stamp), body), given.get("accumulator-signature", ""))


def _public(host: str, port: int, resolve: Callable[..., Any] = socket.getaddrinfo) -> str:
    """An address of the host that is public. Raises Refused where any is not: a name must not lead inside."""
    try:
        found = {info[4][0] for info in resolve(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        raise Failed("the host's name can't be resolved") from None
    for address in found:
        if not ipaddress.ip_address(address.partition("%")[0]).is_global:
            raise Refused("the host is no public address; allow it with private: true")
    return str(sorted(found)[0])


def deliver(endpoint: Endpoint, manifest: Manifest, client: httpx.Client) -> None:
    """Sends a manifest. Raises Refused or Failed; their texts hold neither payload nor secret."""
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = httpx.URL(endpoint.url)
    headers = {"Host": parts.netloc}
    extensions: dict[str, Any] = {}
    if not endpoint.private:
        # The address that was checked is the one connected to, whatever the name resolves to a moment later.
        target = target.copy_with(host=_public(host, port))
        extensions = {"sni_hostname": host}
    body, stamp = body_of(manifest), int(time())
    headers |= {
        "Content-Type": "application/json",
        "Idempotency-Key": manifest.window_id,
        "Accumulator-Attempt": str(manifest.attempt),
        "Accumulator-Timestamp": str(stamp),
        "Accumulator-Signature": sign(endpoint.secret, stamp, body),
        "User-Agent": "event-accumulator",
    }
    try:
        with client.stream(
            "POST", target, content=body, headers=headers, timeout=endpoint.timeout / 1000, extensions=extensions
        ) as response:
            status = response.status_code
    except httpx.HTTPError as problem:
        raise Failed(type(problem).__name__) from None
    if status in PERMANENT:
        raise Refused(f"HTTP {status}")
    if not 200 <= status < 300:
        raise Failed(f"HTTP {status}")


def new_client() -> httpx.Client:
    """A client that follows no redirect and reads no proxy or credentials from the environment."""
    return httpx.Client(follow_redirects=False, trust_env=False)


def new_secret() -> str:
    """A secret to sign with."""
    return secrets.token_urlsafe(32)
