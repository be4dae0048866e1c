"""The sink `webhook`: what is sent, where it may go, what becomes of the answers. The other side is a real server."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time
from typing import Any

import fakeredis
import httpx
import pytest

import accumulator.handlers
from accumulator import webhook
from accumulator.client import Accumulator
from accumulator.closer import Closer
from accumulator.embedded import EmbeddedServer
from accumulator.errors import InvalidSettings
from accumulator.handlers import handler
from accumulator.manifest import Manifest
from accumulator.settings import Config, Settings, WebhookSink
from accumulator.testing import VirtualClock
from accumulator.webhook import (
    Declined,
    Endpoint,
    Failed,
    NotAllowed,
    WebhookRunner,
    body_of,
    check_signature,
    deliver,
    new_client,
    new_secret,
    public_addresses,
    sign,
)
from accumulator.worker import Worker
from tests.conftest import event, wait_until
from tests.processes import let_pass
from tests.test_worker import at_work, own, running

SECRET = "0123456789abcdef-secret"
PAYLOAD = {"card": "4242-secret", "big": 2**63, "none": None, "list": []}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered."""
    monkeypatch.setattr(accumulator.handlers, "_registry", {})


class Receiver:
    """An HTTP server on this host. `answers` are given in turn, the last one for ever: a status, or what to do."""

    def __init__(self) -> None:
        self.answers: list[int | Callable[[BaseHTTPRequestHandler], None]] = [200]
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.connections: set[Any] = set()
        self._lock = threading.Lock()
        ours = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with ours._lock:
                    ours.requests.append((dict(self.headers.items()), body))
                    ours.connections.add(self.client_address)
                    answer = ours.answers.pop(0) if len(ours.answers) > 1 else ours.answers[0]
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def endpoint(self, **more: Any) -> Endpoint:
        return Endpoint(self.url, SECRET, **{"private": True, **more})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with new_client() as client:
        yield client


@pytest.fixture
def manifest(fake: fakeredis.FakeServer, namespace: str, clock: VirtualClock) -> Manifest:
    """A window of two events."""
    with fakeredis.FakeRedis(server=fake, protocol=2) as client:
        target = clock.attach(Accumulator(client, namespace=namespace, partitions=1, clock=clock))
        target.load_policy("f", {"inactivity": "1s", "sink": "none"})
        target.push(event("e1", "t:f:1", clock, payload=PAYLOAD, source_version=2**63 - 1, ref="r-1"))
        target.push(event("e2", "t:f:1", clock, payload=b"\x00\xff", deadline_at="2027-01-01T00:00:00Z"))
        clock.advance("1s")
        [closed] = target.manifests("t:f:1")
        return closed


# -- what is sent


def test_the_request(receiver: Receiver, http: httpx.Client, manifest: Manifest) -> None:
    deliver(receiver.endpoint(), [manifest], http)
    [(headers, body)] = receiver.requests
    assert check_signature(SECRET, headers, body)
    assert headers["Idempotency-Key"] == manifest.window_id
    assert headers["Accumulator-Attempt"] == "0"
    assert headers["Content-Type"] == "application/json"
    assert headers["Host"] == f"127.0.0.1:{receiver.port}"
    told = json.loads(body)
    assert (told["window_id"], told["bucket_key"], told["attempt"]) == (manifest.window_id, "t:f:1", 0)
    [one] = told["manifests"]
    assert one["event_ids"] == ["e1", "e2"]
    assert (one["close_reason"], one["relation"], one["window_version"]) == ("inactivity", "first", 1)
    first, second = one["events"]
    assert first["payload"] == PAYLOAD
    assert (first["source_version"], first["ref"], first["deadline_at"]) == (2**63 - 1, "r-1", None)
    assert "payload" not in second
    assert (second["payload_bytes"], second["deadline_at"]) == ("AP8=", 1_798_761_600_000)


def test_what_is_handed_over_together_is_one_body(manifest: Manifest) -> None:
    told = json.loads(body_of([manifest, manifest]))
    assert [one["window_id"] for one in told["manifests"]] == [manifest.window_id] * 2


def test_a_short_answer_leaves_the_connection_open(receiver: Receiver, http: httpx.Client, manifest: Manifest) -> None:
    for _ in range(3):
        deliver(receiver.endpoint(), [manifest], http)
    assert len(receiver.connections) == 1


def test_an_endless_answer_is_not_read(receiver: Receiver, http: httpx.Client, manifest: Manifest) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(b"x" * 10_000)
        threading.Event().wait(0.5)
        request.close_connection = True

    receiver.answers = [endless]
    deliver(receiver.endpoint(), [manifest], http)


# -- signatures


def test_signatures() -> None:
    body, now = b'{"a":1}', int(time())
    headers = {"ACCUMULATOR-TIMESTAMP": str(now), "accumulator-signature": sign(SECRET, now, body)}
    assert check_signature(SECRET, headers, body)
    assert not check_signature(SECRET, headers, body + b" ")
    assert not check_signature(new_secret(), headers, body)
    old = {"Accumulator-Timestamp": str(now - 301), "Accumulator-Signature": sign(SECRET, now - 301, body)}
    assert not check_signature(SECRET, old, body)
    assert check_signature(SECRET, old, body, tolerance=3600)
    assert sign("k" * 16, 1_700_000_000, b"{}") == (
        "v1=6d58fb78491a4cd45b0a5944663cf2020c2185a67defd8caec14059846f09e3d"
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Accumulator-Timestamp": "now"},
        {"Accumulator-Timestamp": "²"},
        {"Accumulator-Timestamp": "9" * 400},
        {"Accumulator-Timestamp": "-1", "Accumulator-Signature": ""},
    ],
)
def test_what_is_no_signature(headers: Mapping[str, str]) -> None:
    assert not check_signature(SECRET, headers, b"")


def test_a_signature_may_hold_anything() -> None:
    now = str(int(time()))
    assert not check_signature(SECRET, {"Accumulator-Timestamp": now, "Accumulator-Signature": "v1=é🙂"}, b"")


# -- answers


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_good_answers(receiver: Receiver, http: httpx.Client, manifest: Manifest, status: int) -> None:
    receiver.answers = [status]
    deliver(receiver.endpoint(), [manifest], http)


@pytest.mark.parametrize("status", [409, 410])
def test_permanent_answers(receiver: Receiver, http: httpx.Client, manifest: Manifest, status: int) -> None:
    receiver.answers = [status]
    with pytest.raises(Declined, match=f"^HTTP {status}$"):
        deliver(receiver.endpoint(), [manifest], http)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 429, 500, 503])
def test_other_answers(receiver: Receiver, http: httpx.Client, manifest: Manifest, status: int) -> None:
    receiver.answers = [status]
    with pytest.raises(Failed, match=f"^HTTP {status}$"):
        deliver(receiver.endpoint(), [manifest], http)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(receiver: Receiver, http: httpx.Client, manifest: Manifest, status: int) -> None:
    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Location", "/other")
        request.send_header("Content-Length", "0")
        request.end_headers()

    receiver.answers = [elsewhere, 200]
    with pytest.raises(Failed, match=f"HTTP {status}"):
        deliver(receiver.endpoint(), [manifest], http)
    assert len(receiver.requests) == 1


def test_no_answer_in_time(receiver: Receiver, http: httpx.Client, manifest: Manifest) -> None:
    go_on = threading.Event()

    def slow(request: BaseHTTPRequestHandler) -> None:
        go_on.wait(20)
        request.close_connection = True

    receiver.answers = [slow]
    with pytest.raises(Failed, match=r"^ReadTimeout$"):
        deliver(receiver.endpoint(timeout=100), [manifest], http)
    go_on.set()


def test_nobody_listens(http: httpx.Client, manifest: Manifest) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Failed, match=r"^ConnectError$"):
        deliver(Endpoint(f"http://127.0.0.1:{port}/", SECRET, private=True), [manifest], http)


def test_what_is_no_http(receiver: Receiver, http: httpx.Client, manifest: Manifest) -> None:
    def garbage(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"4242-secret\r\n\r\n")
        request.close_connection = True

    receiver.answers = [garbage]
    with pytest.raises(Failed, match=r"^RemoteProtocolError$"):
        deliver(receiver.endpoint(), [manifest], http)


# -- addresses


def resolving(*addresses: str) -> Callable[..., list[tuple[Any, ...]]]:
    """A resolver that answers so."""
    return lambda host, port, **_: [(0, 0, 0, "", (address, port)) for address in addresses]


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "2002:5db8:d822::1"]
)
def test_public_addresses(address: str) -> None:
    assert public_addresses("h", 443, resolving(address)) == [address]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *("224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    with pytest.raises(NotAllowed, match="not public"):
        public_addresses("h", 443, resolving("93.184.216.34", address))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_this_host_under_other_names(http: httpx.Client, manifest: Manifest, receiver: Receiver, host: str) -> None:
    with pytest.raises((NotAllowed, Failed)):
        deliver(Endpoint(f"http://{host}:{receiver.port}/", SECRET), [manifest], http)
    assert receiver.requests == []


def test_a_name_that_does_not_resolve(http: httpx.Client, manifest: Manifest) -> None:
    def nothing(*_: object, **__: object) -> list[tuple[Any, ...]]:
        raise socket.gaierror

    for resolve in (nothing, resolving()):
        with pytest.raises(Failed, match="can't be resolved"):
            deliver(Endpoint("https://example.invalid/", SECRET), [manifest], http, resolve)


class Wire(httpx.BaseTransport):
    """Stands in for the network: what would be connected to. `dead` addresses refuse."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.asked: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if request.url.host in self.dead:
            raise httpx.ConnectError("refused")
        return httpx.Response(204, stream=httpx.ByteStream(b""))


def test_connected_to_is_what_was_checked(manifest: Manifest) -> None:
    """Whatever the name resolves to a moment later: it is not asked again."""
    asked = []

    def once(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        asked.append((host, port))
        return [(0, 0, 0, "", ("93.184.216.34", port))]

    wire = Wire()
    with httpx.Client(transport=wire) as client:
        deliver(Endpoint("https://hook.example/path?x=1", SECRET), [manifest], client, once)
    [request] = wire.asked
    assert asked == [("hook.example", 443)]
    assert str(request.url) == "https://93.184.216.34/path?x=1"
    assert request.headers["Host"] == "hook.example"
    assert request.extensions["sni_hostname"] == "hook.example"


def test_another_address_is_tried_where_one_can_not_be_reached(manifest: Manifest) -> None:
    wire = Wire("2606:2800:220:1::1")
    with httpx.Client(transport=wire) as client:
        endpoint = Endpoint("http://hook.example:8080/", SECRET)
        deliver(endpoint, [manifest], client, resolving("2606:2800:220:1::1", "93.184.216.34"))
        with pytest.raises(Failed, match="ConnectError"):
            deliver(endpoint, [manifest], client, resolving("2606:2800:220:1::1"))
    assert [request.url.host for request in wire.asked] == [
        *("2606:2800:220:1::1", "93.184.216.34", "2606:2800:220:1::1")
    ]
    assert {request.headers["Host"] for request in wire.asked} == {"hook.example:8080"}


def test_international_names(manifest: Manifest) -> None:
    wire = Wire()
    with httpx.Client(transport=wire) as client:
        deliver(Endpoint("https://b\u00fccher.example/", SECRET), [manifest], client, resolving("93.184.216.34"))
    assert wire.asked[0].headers["Host"] == "xn--bcher-kva.example"


# -- endpoints


@pytest.mark.parametrize(
    ("url", "secret", "field"),
    [
        ("ftp://h/", SECRET, "url"),
        ("https:///path", SECRET, "url"),
        ("https://user:pw@h/", SECRET, "url"),
        ("https://h/", "short", "secret"),
    ],
)
def test_what_is_no_endpoint(url: str, secret: str, field: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Endpoint(url, secret)
    assert caught.value.field == field


def test_an_endpoint_shows_neither_url_nor_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    sink = WebhookSink(url="https://h.example/t0ken", secret_env="HOOK_SECRET", timeout="2s", private=True)
    endpoint = Endpoint.of("f", sink)
    assert endpoint == Endpoint("https://h.example/t0ken", SECRET, 2000, True)
    for shown in (repr(endpoint), repr(sink), str(endpoint)):
        assert "t0ken" not in shown
        assert SECRET not in shown


def test_a_secret_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        policies={"f": {"inactivity": "1s", "sink": "webhook"}},
        sinks={"f": {"url": "https://h.example/", "secret_env": "HOOK_SECRET"}},
    )
    settings = Settings(redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(InvalidSettings, match=r"sinks\.f\.secret_env: names HOOK_SECRET, which is not set"):
        Worker(settings, config)
    monkeypatch.setenv("HOOK_SECRET", "short")
    with pytest.raises(InvalidSettings, match=r"sinks\.f\.secret: must be at least 16 characters"):
        Worker(settings, config)
    Worker(settings, config, roles=["closer"]).accumulator.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3:8080", "localhost", "[::1]:8080", "[fd12::1]"])
def test_a_private_address_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    policies = {"f": {"inactivity": "1s", "sink": "webhook"}}
    sink = {"url": f"http://{host}/t0ken", "secret_env": "HOOK_SECRET"}
    settings = Settings(redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(InvalidSettings) as caught:
        Worker(settings, Config(policies=policies, sinks={"f": sink}))
    assert str(caught.value) == "sinks.f.url: names a host that is not public: allow it with private: true"
    for allowed in (
        {**sink, "private": True},
        {**sink, "url": "http://hook.example/"},
        {**sink, "url": "http://1.1.1.1"},
    ):
        Worker(settings, Config(policies=policies, sinks={"f": allowed})).accumulator.close()


# -- the role


def closed(target: Accumulator, count: int = 1, flow: str = "f", **more: Any) -> None:
    target.load_policy(flow, {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "webhook"} | more)
    target.push_many([event("e1", f"t:{flow}:{i}", kind="end", payload=PAYLOAD) for i in range(count)])


def only(target: Accumulator, flow: str = "f") -> Manifest:
    [found] = target.manifests(f"t:{flow}:0")
    return found


def test_manifests_are_posted(live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver) -> None:
    closed(live, 10)
    with own(server.url, namespace) as one, running(WebhookRunner(one, {"f": receiver.endpoint()})):
        wait_until(lambda: all(m.settled for i in range(10) for m in live.manifests(f"t:f:{i}")))
    assert len(receiver.requests) == 10
    assert all(check_signature(SECRET, headers, body) for headers, body in receiver.requests)
    keys = {headers["Idempotency-Key"] for headers, _ in receiver.requests}
    assert len(keys) == 10
    assert {headers["Accumulator-Attempt"] for headers, _ in receiver.requests} == {"1"}
    assert [step[1] for step in only(live).timeline] == ["dispatched", "processing", "confirmed"]


def test_failures_are_tried_again_under_the_same_key(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "BACKOFF", 1)
    closed(live)
    receiver.answers = [503, 302, 429, 200]
    endpoints = {"default": receiver.endpoint()}
    with own(server.url, namespace) as one, running(Closer(one), WebhookRunner(one, endpoints)):
        wait_until(lambda: only(live).settled)
    manifest = only(live)
    assert manifest.state == "confirmed"
    assert {headers["Idempotency-Key"] for headers, _ in receiver.requests} == {manifest.window_id}
    assert [headers["Accumulator-Attempt"] for headers, _ in receiver.requests] == ["1", "2", "3", "4"]
    assert [cause for _, state, _, cause in manifest.timeline if state == "retrying"] == ["Failed"] * 3
    assert manifest.error == "Failed: HTTP 429"


def test_after_the_last_attempt_it_is_dead(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "BACKOFF", 1)
    monkeypatch.setattr(webhook, "MAX_ATTEMPTS", 2)
    closed(live)
    receiver.answers = [500]
    with own(server.url, namespace) as one, running(Closer(one), WebhookRunner(one, {"f": receiver.endpoint()})):
        wait_until(lambda: only(live).state == "dead")
    assert (only(live).error, len(receiver.requests)) == ("Failed: HTTP 500", 2)


@pytest.mark.parametrize("status", [409, 410])
def test_refused_for_good(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver, status: int
) -> None:
    closed(live)
    receiver.answers = [status]
    with own(server.url, namespace) as one, running(WebhookRunner(one, {"f": receiver.endpoint()})):
        wait_until(lambda: only(live).state == "dead")
    manifest = only(live)
    assert (manifest.error, len(receiver.requests)) == (f"Declined: HTTP {status}", 1)


def test_private_addresses_need_leave(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver
) -> None:
    closed(live)
    with own(server.url, namespace) as one, running(WebhookRunner(one, {"f": receiver.endpoint(private=False)})):
        wait_until(lambda: only(live).state == "dead")
    assert receiver.requests == []
    assert only(live).error == "NotAllowed: the host has an address that is not public: allow it with private: true"


def test_a_slow_answer_is_tried_again(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "BACKOFF", 1)
    closed(live)
    go_on = threading.Event()

    def slow(request: BaseHTTPRequestHandler) -> None:
        go_on.wait(20)
        request.close_connection = True

    receiver.answers = [slow, 200]
    with own(server.url, namespace) as one:
        runner = WebhookRunner(one, {"f": receiver.endpoint(timeout=100)}, threads=1)
        with running(Closer(one), runner):
            wait_until(lambda: only(live).settled)
            go_on.set()
        assert runner.abandoned == 0
    assert "Failed: ReadTimeout" in (only(live).error or "")


def test_an_answer_that_trickles_on_is_left_behind(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, the whole never would."""
    monkeypatch.setattr(webhook, "BACKOFF", 1)
    monkeypatch.setattr(WebhookRunner, "SLACK", 50)
    closed(live)
    enough = threading.Event()

    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not enough.wait(0.02):
            request.wfile.write(b"X")
        request.close_connection = True

    receiver.answers = [trickle, 200]
    with own(server.url, namespace) as one:
        runner = WebhookRunner(one, {"f": receiver.endpoint(timeout=200)}, threads=1)
        with running(Closer(one), runner):
            wait_until(lambda: only(live).settled)
            enough.set()
        assert runner.abandoned == 1
    assert [cause for _, state, _, cause in only(live).timeline if state == "retrying"] == ["Timeout"]


def test_handed_over_together(live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver) -> None:
    live.load_policy("f", {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "webhook", "handover": "together"})
    for i in range(3):
        live.push(event(f"e{i}", "t:f:0", kind="end"))
    with own(server.url, namespace) as one, running(WebhookRunner(one, {"f": receiver.endpoint()})):
        wait_until(lambda: all(m.settled for m in live.manifests("t:f:0")))
    [(headers, body)] = receiver.requests
    manifests = live.manifests("t:f:0")
    assert headers["Idempotency-Key"] == manifests[-1].window_id
    assert [one["window_id"] for one in json.loads(body)["manifests"]] == [m.window_id for m in manifests]


def test_the_body_holds_what_a_handler_would_get(
    live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver
) -> None:
    receiver.answers = [410, 200]
    rules = {"kinds": ["k", "end"], "order_by": "source_version", "on_conflict": "accept_newer"}
    live.load_policy("f", {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "webhook"} | rules)
    live.push(event("first", "t:f:0", kind="end", source_version=3))
    with own(server.url, namespace) as one, running(WebhookRunner(one, {"f": receiver.endpoint()})):
        wait_until(lambda: only(live).state == "dead")
        live.push(event("a5", "t:f:0", source_version=5))
        live.push(event("late", "t:f:0", source_version=2))
        live.push(event("odd", "t:f:0", kind="odd", source_version=8))
        [item] = live.reconciliation()
        live.resolve(item, "accept", by="ana", reason="meant so")
        live.push(event("a5", "t:f:0", source_version=9))
        live.push(event("a5", "t:f:0", source_version=9, kind="end", source="other"))
        live.push(event("end", "t:f:0", kind="end"))
        wait_until(lambda: [m.state for m in live.manifests("t:f:0")] == ["dead", "confirmed"])
    (_, before), (headers, body) = receiver.requests
    assert json.loads(before)["previous_state"] is None
    told = json.loads(body)
    last = live.manifests("t:f:0")[-1]
    assert (told["previous_state"], headers["Idempotency-Key"]) == ("dead", told["window_id"])
    [shown] = told["manifests"]
    for name in set(shown) - {"events", "policy_versions"}:
        value = getattr(last, name)
        assert shown[name] == (list(value) if isinstance(value, tuple) else value), name
    flags = ("event_id", "position", "late", "revised", "reconciled", "order", "gap")
    assert [tuple(each[name] for name in flags) for each in shown["events"]] == [
        ("a5", 1, False, False, False, 2, True),
        ("late", 2, True, False, False, 1, False),
        ("odd", 3, False, False, True, 3, True),
        ("a5", 4, False, True, False, 4, False),
        ("end", 5, False, False, False, 5, False),
    ]
    assert [each["received_at"] for each in shown["events"]] == [e.received_at for e in last.events]


def test_no_endpoint(live: Accumulator, server: EmbeddedServer, namespace: str, receiver: Receiver) -> None:
    """It is given back, and waits for one."""
    closed(live)
    with own(server.url, namespace) as one:
        with running(WebhookRunner(one, {"other": receiver.endpoint()})):
            wait_until(lambda: only(live).state == "retrying")
        assert [step[3] for step in only(live).timeline] == ["taken", "begun", "HandlerMissing"]
        assert only(live).error == "HandlerMissing: flow f: no endpoint is configured for it"
        let_pass(live)
        with running(Closer(one), WebhookRunner(one, {"f": receiver.endpoint()})):
            wait_until(lambda: only(live).state == "confirmed")


def test_a_worker_posts_and_says_what_has_no_endpoint(
    live: Accumulator,
    server: EmbeddedServer,
    namespace: str,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    caplog.set_level(logging.DEBUG, "accumulator")
    handler("default")(lambda _: None)
    closed(live, flow="lonely")
    config = Config(
        policies={"f": {"inactivity": "1h", "terminal_kinds": ["end"], "sink": "webhook"}},
        sinks={"f": {"url": receiver.url, "secret_env": "HOOK_SECRET", "private": True}},
    )
    with at_work(Worker(Settings(redis_url=server.url, namespace=namespace), config)):
        wait_until(lambda: "f" in live.policies())
        live.push(event("e1", "t:f:0", kind="end", payload=PAYLOAD))
        wait_until(lambda: only(live).state == "confirmed")
        health = live.health()
    assert any("has an endpoint for flow lonely (sink webhook)" in problem for problem in health.problems)
    [said] = [line for line in caplog.text.splitlines() if "endpoint_missing" in line]
    assert "lonely" in said
    for hidden in (SECRET, "4242-secret", "x=1", "t:f:0"):
        assert hidden not in caplog.text
