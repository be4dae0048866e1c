"""What a process is told: the environment, the configuration file, and what either may not say."""

from __future__ import annotations

import pickle
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from accumulator.errors import InvalidPolicy, InvalidSettings
from accumulator.policy import Policy
from accumulator.settings import MAX_CONFIG_BYTES, Config, RqSink, Settings, WebhookSink, load_yaml

SAMPLE = Path(__file__).parent.parent / "config" / "accumulator.yaml"
SECRET = "hunter2"
SCHEMES = (
    "must begin with redis://, rediss:// or unix://; with redis+cluster:// or redis+sentinel:// for those "
    "(rediss+… for TLS)"
)
HINT = "in a password, / ? # @ : and % are percent-encoded (/ is %2F)"


SERVICE = "must name the service that the Sentinels watch: redis+sentinel://host:26379/service"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ACCUMULATOR_{name.upper()}", raising=False)


def refused(**values: Any) -> InvalidSettings:
    with pytest.raises(InvalidSettings) as caught:
        Settings(**values)
    return caught.value


# The environment


def test_every_setting_has_a_default() -> None:
    settings = Settings()
    assert settings.model_dump() == {
        "redis_url": SecretStr("redis://127.0.0.1:6379/0"),
        "rq_url": None,
        "namespace": "acc",
        "partitions": 64,
        "config": None,
        "log_level": "info",
        "log_plain_keys": False,
        "socket_timeout": 5000,
        "socket_connect_timeout": 5000,
    }
    assert settings.url == "redis://127.0.0.1:6379/0"


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "REDIS_URL": "rediss://cache.example:7000/2",
        "RQ_URL": "redis://jobs.example/1",
        "NAMESPACE": "orders-2_b",
        "PARTITIONS": "4096",
        "CONFIG": "etc/a.yaml",
        "LOG_LEVEL": "DEBUG",
        "LOG_PLAIN_KEYS": "true",
        "SOCKET_TIMEOUT": "250ms",
        "SOCKET_CONNECT_TIMEOUT": "1h",
    }.items():
        monkeypatch.setenv(f"ACCUMULATOR_{name}", value)
    assert Settings().model_dump() == {
        "redis_url": SecretStr("rediss://cache.example:7000/2"),
        "rq_url": SecretStr("redis://jobs.example/1"),
        "namespace": "orders-2_b",
        "partitions": 4096,
        "config": Path("etc/a.yaml"),
        "log_level": "debug",
        "log_plain_keys": True,
        "socket_timeout": 250,
        "socket_connect_timeout": 3_600_000,
    }


def test_an_empty_variable_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", "")
    monkeypatch.setenv("ACCUMULATOR_PARTITIONS", "")
    assert Settings().partitions == 64
    assert Settings().url == "redis://127.0.0.1:6379/0"


NAMESPACE = "must be 1 to 32 characters out of a-z, 0-9, '_' and '-'"
PARTITIONS = "must be a whole number from 1 to 4096, not "


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("namespace", "Acc", NAMESPACE),
        ("namespace", "a" * 33, NAMESPACE),
        ("namespace", "a:b", NAMESPACE),
        ("namespace", "a\n", NAMESPACE),
        ("namespace", 5, "must be text"),
        ("partitions", "0", f"{PARTITIONS}0"),
        ("partitions", "4097", f"{PARTITIONS}4097"),
        ("partitions", "-1", f"{PARTITIONS}'-1'"),
        ("partitions", "64.0", f"{PARTITIONS}'64.0'"),
        ("partitions", "1_0", f"{PARTITIONS}'1_0'"),
        ("partitions", "9" * 5000, f"{PARTITIONS}'{'9' * 40}…'"),
        ("partitions", True, f"{PARTITIONS}true"),
        ("partitions", 64.0, f"{PARTITIONS}64.0"),
        ("log_level", "loud", "must be 'debug', 'info', 'warning', 'error' or 'critical'"),
        ("log_level", 10, "must be 'debug', 'info', 'warning', 'error' or 'critical'"),
        ("log_plain_keys", "perhaps", "must be true or false"),
        ("socket_timeout", "0s", "must be above zero, not '0s'"),
        ("socket_timeout", "2h", "must be at most 1h"),
        ("socket_timeout", 5, "5 is a bare number: write it with its unit, as in 10s"),
        (
            "socket_connect_timeout",
            "5",
            "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not '5'",
        ),
        ("redis_uri", "x", "is unknown; did you mean redis_url?"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: object, rule: str) -> None:
    error = refused(**{field: value})
    assert (error.field, error.rule) == (field, rule)


def test_a_wrong_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCUMULATOR_PARTITIONS", "many")
    assert str(refused()) == f"partitions: {PARTITIONS}'many'"


def test_the_namespace_of_the_file_counts_where_the_environment_names_none() -> None:
    config = Config(namespace="shop", partitions=8)
    assert Settings().with_config(config).namespace == "shop"
    assert Settings().with_config(config).partitions == 8
    assert Settings(namespace="test", partitions="16").with_config(config).namespace == "test"
    assert Settings(namespace="test", partitions="16").with_config(config).partitions == 16
    assert Settings().with_config(Config()) == Settings()


# The server's URL, and its password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://localhost", "redis://localhost"),
        ("redis://localhost/", "redis://localhost/"),
        (f"redis://:{SECRET}@cache:6379/1", "redis://cache:6379/1"),
        (f"rediss://user:{SECRET}@[::1]:6379", "rediss://[::1]:6379"),
        (f"redis://cache/0?password={SECRET}&protocol=3", "redis://cache/0"),
        (f"redis://:{SECRET}%2F%40%23@cache", "redis://cache"),
        (f"unix://user:{SECRET}@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        (f"redis+cluster://ana:{SECRET}@cache:7000,[::1]:7001", "redis+cluster://cache:7000,[::1]:7001"),
        (f"rediss+cluster://cache?password={SECRET}", "rediss+cluster://cache"),
        (
            f"redis+sentinel://:{SECRET}@cache,b:26380/mine/2?sentinel_username=s&sentinel_password={SECRET}",
            "redis+sentinel://cache,b:26380/mine/2",
        ),
    ],
)
def test_a_url_is_shown_without_what_is_secret(url: str, shown: str) -> None:
    settings = Settings(redis_url=url)
    assert settings.url == url
    assert settings.shown_url == shown
    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert SECRET not in text
        assert "cache" not in text


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (f"http://:{SECRET}@cache", SCHEMES),
        (f":{SECRET}@cache", SCHEMES),
        (SECRET, SCHEMES),
        (f"redis://:{SECRET}@", f"must name a host and, if any, a port; {HINT}"),
        (f"redis://:{SECRET}@cache:0", f"must name a host and, if any, a port; {HINT}"),
        (f"redis://:{SECRET}@cache:99999", f"can't be read as a URL; {HINT}"),
        (f"redis://:{SECRET}@cache:x{SECRET}", f"can't be read as a URL; {HINT}"),
        (f"redis://:a/{SECRET}@cache", f"can't be read as a URL; {HINT}"),
        (f"redis://user:1/{SECRET}@cache", f"can't be read as a URL; {HINT}"),
        (f"redis://user:1?{SECRET}@cache", f"can't be read as a URL; {HINT}"),
        (f"redis://user:1#{SECRET}@cache", f"can't be read as a URL; {HINT}"),
        (f"redis://:{SECRET}\u2100@cache", f"can't be read as a URL; {HINT}"),
        (f"redis://:{SECRET}@[cache", f"can't be read as a URL; {HINT}"),
        (f"redis://cache/{SECRET}", f"may hold nothing but a database number after the host; {HINT}"),
        (f"unix://:1/{SECRET}@/run/redis.sock", f"can't be read as a URL; {HINT}"),
        (f"unix://{SECRET}/redis.sock", "must hold three slashes before the socket: unix:///path"),
        (f"unix://:{SECRET}@", "must hold three slashes before the socket: unix:///path"),
        (f"redis://:{SECRET}@a,b", "names several hosts, which is for redis+cluster:// and redis+sentinel://"),
        (f"redis+cluster://:{SECRET}@a,,b", f"must name a host and, if any, a port; {HINT}"),
        (f"redis+cluster://:{SECRET}@a:x,b", f"can't be read as a URL; {HINT}"),
        (f"redis+cluster://:{SECRET}@{','.join('a' * 101)}", "must name at most 100 hosts"),
        (f"redis+cluster://:{SECRET}@a/1", f"may hold nothing after the hosts: a cluster has no databases; {HINT}"),
        (f"redis+cluster://a?db={SECRET}", f"may hold nothing after the hosts: a cluster has no databases; {HINT}"),
        (f"redis+sentinel://:{SECRET}@a:26379", SERVICE),
        (f"redis+sentinel://a/{SECRET}%2F/1", SERVICE),
        (f"redis+sentinel://a/mine/{SECRET}", f"may hold nothing but a database number after the service; {HINT}"),
        (f"redis+sentinel://a/mine?sentinel_password=@{SECRET}", f"can't be read as a URL; {HINT}"),
    ],
)
def test_a_wrong_url_is_refused_without_being_shown(url: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCUMULATOR_REDIS_URL", url)
    error = refused()
    assert (error.field, error.rule) == ("redis_url", rule)
    assert error.__context__ is None, "a handler that prints causes would show the URL"
    said = "".join(traceback.format_exception(error)) + repr(error) + repr(pickle.loads(pickle.dumps(error)))
    assert SECRET not in said


def test_a_url_among_other_mistakes_is_not_shown() -> None:
    error = refused(redis_url=f"redis://:{SECRET}@cache", partitions=0)
    assert SECRET not in repr(error) + str(error)
    assert str(refused(redis_url={"password": SECRET})) == "redis_url: must be text"


# The configuration file


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "accumulator.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused_file(folder: Path, text: str | bytes) -> InvalidSettings:
    with pytest.raises(InvalidSettings) as caught:
        Config.load(write(folder, text))
    return caught.value


def test_the_sample_configuration_is_right_and_names_the_demo() -> None:
    config = Config.load(SAMPLE)
    assert (config.namespace, config.partitions) == ("acc", 64)
    assert config.handlers == ("accumulator.demo",)
    assert list(config.policies) == ["pedido", "documento", "default"]
    assert config.policies["pedido"].inactivity == 3000
    assert "pago" in config.policies["pedido"].terminal_kinds
    assert config.policies["documento"].keep == "last"
    assert config.policies["documento"].sink == "rq"


def test_a_file_says_everything(tmp_path: Path) -> None:
    config = Config.load(
        write(
            tmp_path,
            """
            namespace: shop
            partitions: 8
            handlers: [shop.handlers, shop.more_handlers]
            max_unsettled: 1
            max_reconcile: 1000000000
            policies:
              chat: &chat {inactivity: 10s, max_age: 1m}
              default: *chat
              "a%3Ab": {<<: *chat, max_age: 2m}
            """,
        )
    )
    chat = Policy(inactivity="10s", max_age="1m")
    assert (
        config.model_dump()
        == Config(
            namespace="shop",
            partitions=8,
            handlers=["shop.handlers", "shop.more_handlers"],
            max_unsettled=1,
            max_reconcile=1_000_000_000,
            policies={"chat": chat, "default": chat, "a%3Ab": {"inactivity": "10s", "max_age": "2m"}},
        ).model_dump()
    )
    assert config.policies["default"] == chat


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}", "policies:\nhandlers:\n", b"\xef\xbb\xbf{}"])
def test_an_empty_file_leaves_every_default(tmp_path: Path, text: str | bytes) -> None:
    config = Config.load(write(tmp_path, text))
    assert config == Config()
    assert (config.namespace, config.partitions, config.handlers, config.policies) == (None, None, (), {})
    assert (config.max_unsettled, config.max_reconcile) == (1_000_000, 100_000)


CEILING = "must be a whole number from 1 to 1000000000, not "
MODULES = "must list module names, as in my_project.handlers, not "


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("polices: {}", "polices", "is unknown; did you mean policies?"),
        (f"redis_url: redis://:{SECRET}@cache", "redis_url", "is unknown"),
        ("1: 2", "1", "is unknown"),
        ("? !!binary aGVsbG8=\n: 2", "a bytes", "is unknown"),
        ("namespace: Shop", "namespace", NAMESPACE),
        ("namespace: 5", "namespace", "must be text"),
        ("partitions: 0", "partitions", f"{PARTITIONS}0"),
        ("partitions: 64.0", "partitions", f"{PARTITIONS}64.0"),
        ("partitions: yes", "partitions", f"{PARTITIONS}true"),
        ("max_unsettled: 0", "max_unsettled", f"{CEILING}0"),
        ("max_unsettled: 1000000001", "max_unsettled", f"{CEILING}1000000001"),
        ("max_unsettled: '5'", "max_unsettled", f"{CEILING}'5'"),
        ("max_unsettled:", "max_unsettled", f"{CEILING}null"),
        ("max_reconcile: 1.5", "max_reconcile", f"{CEILING}1.5"),
        ("max_reconcile: true", "max_reconcile", f"{CEILING}true"),
        ("handlers: shop.handlers", "handlers", "must be a list of module names, not 'shop.handlers'"),
        ("handlers: {a: b}", "handlers", "must be a list of module names, not a mapping"),
        ("handlers: [5]", "handlers", f"{MODULES}5"),
        ("handlers: [shop/handlers.py]", "handlers", f"{MODULES}'shop/handlers.py'"),
        ("handlers: ['']", "handlers", f"{MODULES}''"),
        ("handlers: [.relative]", "handlers", f"{MODULES}'.relative'"),
        (f"handlers: [{'x' * 201}]", "handlers", f"{MODULES}'{'x' * 40}…'"),
        ("handlers: [a.b, a.b]", "handlers", "lists 'a.b' twice"),
        (
            f"handlers: [{', '.join(f'm{n}' for n in range(101))}]",
            "handlers",
            "must list at most 100 modules",
        ),
        ("policies: [pedido]", "policies", "must map flows to policies, and is a list"),
        ("policies: pedido", "policies", "must map flows to policies, and is 'pedido'"),
        (
            "policies: {" + ", ".join(f"f{n}: {{inactivity: 1s}}" for n in range(1001)) + "}",
            "policies",
            "must hold at most 1000 flows",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path: Path, text: str, field: str, rule: str) -> None:
    error = refused_file(tmp_path, text)
    assert (error.field, error.rule) == (field, rule)
    assert SECRET not in str(error)


# Sinks


def test_sinks_of_a_file(tmp_path: Path) -> None:
    config = Config.load(
        write(
            tmp_path,
            """
            policies:
              order: {inactivity: 1s}
              report: {inactivity: 1s, sink: webhook}
            sinks:
              order: {queue: slow, result_ttl: 90s, failure_ttl: 3d}
              elsewhere: {queue: fast}
              report: {url: "https://h.example/t0ken?a=1", secret_env: REPORT_SECRET, timeout: 5s, private: true}
            rq: {url: "redis://:pa55@jobs.example/1", queue: usual}
            max_in_flight: {acme: 4, default: 20}
            """,
        )
    )
    assert config.rq_sink("order") == RqSink(queue="slow", result_ttl="90s", failure_ttl="3d")
    assert config.rq_sink("unnamed") == config.rq_sink("report") == RqSink()
    assert config.queues == ("usual", "fast", "slow")
    url = "https://h.example/t0ken?a=1"
    wanted = WebhookSink(url=url, secret_env="REPORT_SECRET", timeout="5s", private=True)
    assert config.webhooks == {"report": wanted}
    assert config.max_in_flight == {"acme": 4, "default": 20}
    for shown in (repr(config), str(config), repr(Settings().with_config(config))):
        assert "pa55" not in shown
        assert "t0ken" not in shown


def test_defaults_of_sinks() -> None:
    config = Config()
    assert (config.sinks, config.queues, config.max_in_flight) == ({}, ("accumulator",), {})
    assert (RqSink().result_ttl, RqSink().failure_ttl) == (1000, 86_400_000)
    assert Config(max_in_flight=5).max_in_flight == {"default": 5}
    assert Config(max_in_flight=None, sinks=None, rq=None).rq.url is None
    served = Config(sinks={"default": {"queue": "rest"}})
    assert served.rq_sink("any").queue == "rest"


def test_rqs_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().rq_server == Settings().url
    config = Config(rq={"url": "redis://file.example/0"})
    assert Settings().with_config(config).rq_server == "redis://file.example/0"
    monkeypatch.setenv("ACCUMULATOR_RQ_URL", "redis://environment.example/0")
    assert Settings().with_config(config).rq_server == "redis://environment.example/0"


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = WebhookSink(url="https://h.example/", secret_env="HOOK")
    with pytest.raises(InvalidSettings, match="secret_env: names HOOK, which is not set in the environment"):
        sink.secret()
    monkeypatch.setenv("HOOK", "told")
    assert sink.secret() == "told"


def test_the_readmes_configuration_is_right(tmp_path: Path) -> None:
    readme = (SAMPLE.parent.parent / "README.md").read_text(encoding="utf-8")
    [text] = [part for part in readme.split("```yaml\n")[1:] if "\nsinks:" in part.partition("```")[0]]
    assert Config.load(write(tmp_path, text.partition("```")[0])).webhooks


HOOK = "url: 'https://h/', secret_env: S"
NUMBER = "must be a whole number from 1 to 1000000000, not "


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("sinks: [f]", "sinks", "must map flows to options of their sinks, and is a list"),
        ("sinks: {'a:b': {queue: q}}", "sinks", "'a:b' must stand as in a bucket key"),
        ("sinks: {5: {queue: q}}", "sinks", "5 must be text"),
        ("sinks: {f: q}", "sinks.f", "must be a mapping, not 'q'"),
        ("sinks: {f: {}}", "sinks.f", "is empty: there are failure_ttl, private, queue, result_ttl"),
        ("sinks: {f: {que: q}}", "sinks.f.que", "is unknown: there are failure_ttl, private, queue"),
        ("sinks: {f: {queue: q, ttl: 1s}}", "sinks.f.ttl", "is unknown"),
        ("sinks: {f: {queue: q, 5: 6}}", "sinks.f.5", "is unknown"),
        ("sinks: {f: {queue: 'a b'}}", "sinks.f.queue", "must be 1 to 100 of A-Z, a-z, 0-9"),
        ("sinks: {f: {queue: q, result_ttl: 5}}", "sinks.f.result_ttl", "5 is a bare number"),
        ("sinks: {f: {queue: q, failure_ttl: 0}}", "sinks.f.failure_ttl", "0 is a bare number"),
        ("sinks: {f: {queue: q, url: 'https://h/'}}", "sinks.f", "mixes options of the sinks rq and webhook"),
        ("sinks: {f: {secret_env: S}}", "sinks.f.url", "is required"),
        ("sinks: {f: {url: 'https://h/'}}", "sinks.f.secret_env", "is required"),
        ("sinks: {f: {url: 5, secret_env: S}}", "sinks.f.url", "must be text"),
        ("sinks: {f: {url: 'ftp://h/', secret_env: S}}", "sinks.f.url", "must begin with http:// or https://"),
        ("sinks: {f: {url: 'https://u:pa55@h/', secret_env: S}}", "sinks.f.url", "must hold no user or password"),
        ("sinks: {f: {url: 'https://h/#a', secret_env: S}}", "sinks.f.url", "must be ASCII without spaces"),
        ("sinks: {f: {url: 'https://h:99999/', secret_env: S}}", "sinks.f.url", "can't be read as a URL"),
        (
            "sinks: {f: {url: 'https://h/', secret_env: 'a-b'}}",
            "sinks.f.secret_env",
            "must be the name of an environment",
        ),
        (f"sinks: {{f: {{{HOOK}, timeout: 2h}}}}", "sinks.f.timeout", "must be at most 1h"),
        (f"sinks: {{f: {{{HOOK}, private: 'yes'}}}}", "sinks.f.private", "must be true or false"),
        (
            "policies: {f: {inactivity: 1s, sink: webhook}}",
            "sinks.f",
            "is missing: the policy's sink is webhook, which needs url and secret_env",
        ),
        (
            f"policies: {{f: {{inactivity: 1s, sink: webhook, requery_kinds: [a]}}}}\nsinks: {{default: {{{HOOK}}}}}",
            "sinks.f",
            "contradicts the policy's requery_kinds",
        ),
        (
            "policies: {f: {inactivity: 1s, sink: webhook}}\nsinks: {f: {queue: q}}",
            "sinks.f",
            "has options of the sink rq, and the policy's sink is webhook",
        ),
        (
            f"policies: {{f: {{inactivity: 1s}}}}\nsinks: {{f: {{{HOOK}}}}}",
            "sinks.f",
            "has options of the sink webhook",
        ),
        (
            "policies: {f: {inactivity: 1s, sink: direct}}\nsinks: {f: {queue: q}}",
            "sinks.f",
            "must go: the policy's sink is direct, which has no options",
        ),
        ("sinks: {" + ", ".join(f"f{n}: {{queue: q}}" for n in range(1001)) + "}", "sinks", "must hold at most 1000"),
        ("rq: here", "rq", "must be a mapping, not 'here'"),
        ("rq: {uri: x}", "rq.uri", "is unknown; did you mean url?"),
        ("rq: {url: 'http://:pa55@h/'}", "rq.url", SCHEMES),
        ("rq: {url: 'redis+cluster://:pa55@h/'}", "rq.url", "is a Redis Cluster's, and RQ can't live there: name a"),
        ("rq: {queue: }", "rq.queue", "must be 1 to 100 of"),
        ("max_in_flight: 0", "max_in_flight", f"{NUMBER}0"),
        ("max_in_flight: true", "max_in_flight", f"{NUMBER}true"),
        ("max_in_flight: {a: 0}", "max_in_flight", "must give 'a' a whole number from 1 to 1000000000, not 0"),
        ("max_in_flight: {'a:b': 1}", "max_in_flight", "must name tenants as they stand in a bucket key, not 'a:b'"),
        ("max_in_flight: {1: 1}", "max_in_flight", "must name tenants as they stand in a bucket key, not 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_sinks_are_refused_by_name(tmp_path: Path, text: str, field: str, rule: str) -> None:
    error = refused_file(tmp_path, text)
    assert error.field == field
    assert error.rule.startswith(rule)
    assert "pa55" not in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "policies: {pedido: {inactivity: 2h}}",
            "policy pedido: inactivity: must not be above max_age: 2h against 1h",
        ),
        ("policies: {pedido: }", "policy pedido: policy: must be a mapping of options, not null"),
        ("policies: {5: {inactivity: 2s}}", "policy 5: flow: must be text: put quotes around 5"),
        ("policies: {no: {inactivity: 2s}}", "policy false: flow: must be text: put quotes around false"),
        ("policies: &p {pedido: *p}", "policy pedido: pedido: is unknown"),
        (
            "policies: {pedido: {inactivity: 2s, cutoffs: [12:30]}}",
            'policy pedido: cutoffs: must list texts: YAML reads 12:30 without quotes as 750; write "12:30"',
        ),
    ],
)
def test_a_wrong_policy_in_a_file_is_refused_by_flow_and_option(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Config.load(write(tmp_path, text))
    assert str(caught.value) == said


@pytest.mark.parametrize(("text", "said"), [("[]", "a list"), ("5", "5"), ("pedido", "'pedido'")])
def test_a_file_is_a_mapping(tmp_path: Path, text: str, said: str) -> None:
    error = refused_file(tmp_path, text)
    assert (error.field, error.rule) == (str(tmp_path / "accumulator.yaml"), f"must be a mapping, not {said}")


def test_a_file_that_can_not_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    for path, reason in [
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ]:
        with pytest.raises(InvalidSettings) as caught:
            Config.load(path)
        assert (caught.value.field, caught.value.rule) == (str(path), f"can't be read: {reason}")
    with pytest.raises(InvalidSettings, match="can't be read: no such path"):
        Config.load("a\x00b")


def test_a_file_may_have_one_mebibyte_and_no_more(tmp_path: Path) -> None:
    text = b"#" * (MAX_CONFIG_BYTES - 1) + b"\n"
    assert Config.load(write(tmp_path, text)) == Config()
    assert refused_file(tmp_path, text + b"#").rule == "must be at most 1 MiB"


# YAML


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"a: 1\nb: 2\na: 3", "line 3, column 1: 'a' stands twice"),
        (b"a: {b: 1, 'b': 2}", "line 1, column 11: 'b' stands twice"),
        (b"{<<: {a: 1}, <<: {b: 1}}", "line 1, column 14: '<<' stands twice"),
        (b"a: !!set {x, x}", "line 1, column 14: 'x' stands twice"),
        (b"<<: 5", "line 1, column 5: << takes mappings only"),
        (b"<<: [{a: 1}, b]", "line 1, column 14: << takes mappings only"),
        (b"a: b: c", "line 1, column 5: mapping values are not allowed here"),
        (b"a: *z", "line 1, column 4: found undefined alias 'z'"),
        (b"a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        (b"? [1]\n: 2", "line 1, column 3: found unhashable key"),
        (
            b"a: !!python/object/apply:os.system [ls]",
            "line 1, column 4: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        (
            b"!" * 5000,
            "line 1, column 1: could not determine a constructor for the tag 'tag:yaml.org,2002:" + "!" * 135,
        ),
        (b"a: \xff", "must be UTF-8; byte 3 is not"),
        (b"a: \x01", "character 3 is not allowed in YAML"),
        (b"[" * 5000, "is nested too deeply"),
        (b"&a {<<: *a}", "is nested too deeply"),
        (b"a: 2026-13-45", "holds a number, date or tag that YAML can't read"),
        (b"a: " + b"9" * 5000, "holds a number, date or tag that YAML can't read"),
        (b"a: !!int x", "holds a number, date or tag that YAML can't read"),
        (b"a: !!bool x", "holds a number, date or tag that YAML can't read"),
        (b"a: !!timestamp x", "holds a number, date or tag that YAML can't read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_plain_yaml_is_refused_with_the_place(text: bytes, rule: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_yaml(text, "a.yaml")
    assert (caught.value.field, caught.value.rule) == ("a.yaml", rule)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a: [1, 1.5, yes, null, 12:30, x, '1']", {"a": [1, 1.5, True, None, 750, "x", "1"]}),
        ("a: 2026-10-16T14:00:00Z", {"a": datetime(2026, 10, 16, 14, tzinfo=UTC)}),
        ("a: &a [1]\nb: *a", {"a": [1], "b": [1]}),
        ("a: {<<: []}", {"a": {}}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}),
        ("a: &a {x: 1}\nb: {x: 4, <<: *a}", {"a": {"x": 1}, "b": {"x": 4}}),
        ("a: {<<: [{x: 1}, {x: 2, y: 3}]}", {"a": {"x": 1, "y": 3}}),
        # A merged mapping is taken as it reads, with its own merge done, whichever is built first.
        ("p: {q: &b {<<: {x: 1}, x: 2}}\nz: {<<: *b}", {"p": {"q": {"x": 2}}, "z": {"x": 2}}),
    ],
)
def test_plain_yaml_reads_as_it_says(text: str, read: object) -> None:
    assert load_yaml(text.encode(), "a.yaml") == read


def test_merge_keys_can_not_blow_a_small_file_up() -> None:
    pairs = ", ".join(f"k{n}: 1" for n in range(500))
    lines = [f"a0: &a0 {{{pairs}}}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 40)]
    with pytest.raises(InvalidSettings, match="too much is merged with <<"):
        load_yaml("\n".join(lines).encode(), "a.yaml")
