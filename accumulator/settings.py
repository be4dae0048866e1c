"""What a process is told: its environment (:class:`Settings`) and its configuration file (:class:`Config`).

The library takes values; only the workers and the command line make these two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    SkipValidation,
    ValidationError,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from accumulator.address import Address, address_problem
from accumulator.errors import InvalidSettings
from accumulator.keys import MAX_PARTITIONS, check_namespace
from accumulator.ladders import Ladder
from accumulator.policy import Policy, broken, duration_option, first_problem, flow_problem, shown, whole_number

__all__ = [
    "MAX_CONFIG_BYTES",
    "USUAL_CONFIG",
    "Config",
    "RqServer",
    "RqSink",
    "Settings",
    "WebhookSink",
    "find_config",
    "load_yaml",
]

USUAL_CONFIG: Final = "config/accumulator.yaml"
MAX_CONFIG_BYTES: Final = 1024 * 1024
MAX_HANDLERS: Final = 100
MAX_FLOWS: Final = 1000
MAX_CEILING: Final = 1_000_000_000
MAX_TENANTS: Final = 10_000
MAX_TIMEOUT_MS: Final = 3_600_000
DEFAULT: Final = "default"
"""Stands for every flow, or tenant, that has no entry of its own."""
# YAML's merge keys may multiply what a file holds without end; a configuration never comes near this.
MAX_MERGED: Final = 100_000

_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_QUEUE: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


# Fields


def _partitions(value: object) -> int:
    digits = isinstance(value, str) and _DIGITS.fullmatch(value)
    return whole_number(int(value) if isinstance(value, str) and digits else value, 1, MAX_PARTITIONS)


def _ceiling(value: object) -> int:
    return whole_number(value, 1, MAX_CEILING)


def _timeout(value: object) -> int:
    ms = duration_option(value)
    if ms > MAX_TIMEOUT_MS:
        raise broken("must be at most 1h")
    return ms


def _redis_url(value: SecretStr) -> SecretStr:
    problem = address_problem(value.get_secret_value())
    if problem is not None:
        raise broken(problem)
    return value


def _rq_url(value: SecretStr) -> SecretStr:
    if Address.of(_redis_url(value).get_secret_value()).kind == "cluster":
        raise broken("is a Redis Cluster's, and RQ can't live there: name a server of its own")
    return value


def _modules(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise broken(f"must be a list of module names, not {shown(value)}")
    if len(value) > MAX_HANDLERS:
        raise broken(f"must list at most {MAX_HANDLERS} modules")
    for name in value:
        if not isinstance(name, str) or len(name) > 200 or not all(p.isidentifier() for p in name.split(".")):
            raise broken(f"must list module names, as in my_project.handlers, not {shown(name)}")
        if value.count(name) > 1:
            raise broken(f"lists {shown(name)} twice")
    return tuple(value)


def _queue(value: object) -> str:
    if not isinstance(value, str) or not _QUEUE.fullmatch(value):
        raise broken(f"must be 1 to 100 of A-Z, a-z, 0-9, '_', '.' and '-', not {shown(value)}")
    return value


def _endpoint(value: object) -> str:
    """A URL of which nothing is shown: its path may be a secret."""
    if not isinstance(value, str):
        raise broken("must be text")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise broken("can't be read as a URL") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise broken("must begin with http:// or https:// and name a host")
    if "@" in parts.netloc:
        raise broken("must hold no user or password: the signature says who sends")
    if parts.fragment or not value.isascii() or not value.isprintable() or " " in value:
        raise broken("must be ASCII without spaces and fragment, the rest percent-encoded")
    return value


def _variable(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise broken("must be the name of an environment variable")
    return value


def _limits(value: object) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {DEFAULT: whole_number(value, 1, MAX_CEILING)}
    if len(value) > MAX_TENANTS:
        raise broken(f"must name at most {MAX_TENANTS} tenants")
    for tenant, limit in value.items():
        if not isinstance(tenant, str) or not tenant or ":" in tenant or len(tenant.encode(errors="replace")) > 512:
            raise broken(f"must name tenants as they stand in a bucket key, not {shown(tenant)}")
        if type(limit) is not int or not 1 <= limit <= MAX_CEILING:
            raise broken(f"must give {shown(tenant)} a whole number from 1 to {MAX_CEILING}, not {shown(limit)}")
    return dict(value)


# The environment


class Settings(BaseSettings):
    """What a process reads from ``ACCUMULATOR_…``; an empty variable is none at all. Raises InvalidSettings.

    The server's URL may hold a password: it is shown nowhere, in ``repr``, ``str``, dumps or errors.
    """

    model_config = SettingsConfigDict(
        env_prefix="ACCUMULATOR_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    redis_url: Annotated[SecretStr, AfterValidator(_redis_url)] = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="the server, the cluster or the Sentinels"
    )
    rq_url: Annotated[SecretStr, AfterValidator(_rq_url)] | None = Field(
        None, description="RQ's server, where it is another one"
    )
    namespace: Annotated[str, AfterValidator(check_namespace)] = Field(
        "acc", description="prefix of every key: 1 to 32 of a-z, 0-9, _ and -"
    )
    partitions: Annotated[int, BeforeValidator(_partitions)] = Field(
        64, description="shares of the key space, 1 to 4096; fixed once the namespace is in use"
    )
    config: Path | None = Field(None, description="the YAML file with policies and handlers")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    ] = Field("info", description="debug, info, warning, error or critical")
    log_plain_keys: bool = Field(False, description="bucket keys in logs as they are, instead of hashed")
    socket_timeout: Annotated[int, BeforeValidator(_timeout)] = Field(
        "5s", validate_default=True, description="how long a call may wait for the server; read back in ms"
    )
    socket_connect_timeout: Annotated[int, BeforeValidator(_timeout)] = Field(
        "5s", validate_default=True, description="how long connecting may take; read back in ms"
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
            return
        except ValidationError as error:
            field, rule = first_problem(error, type(self).model_fields)
        # Outside of the except block: what is raised here keeps no hold of the value that was refused.
        raise InvalidSettings(field, rule)

    @property
    def url(self) -> str:
        """The server's URL with its password, for the connection and for nothing else."""
        return self.redis_url.get_secret_value()

    @property
    def shown_url(self) -> str:
        """The server's URL as people may see it: without user, password and query."""
        return Address.of(self.url).shown

    @property
    def timeouts(self) -> dict[str, float]:
        """redis-py's options for them, in s."""
        return {
            "socket_timeout": self.socket_timeout / 1000,
            "socket_connect_timeout": self.socket_connect_timeout / 1000,
        }

    @property
    def rq_server(self) -> str:
        """The URL of RQ's server with its password; ours where it has none of its own."""
        return self.url if self.rq_url is None else self.rq_url.get_secret_value()

    def with_config(self, config: Config) -> Self:
        """These settings, with namespace, partitions and RQ's server of `config` where the environment names none."""
        wanted = {"namespace": config.namespace, "partitions": config.partitions, "rq_url": config.rq.url}
        return self.model_copy(
            update={k: v for k, v in wanted.items() if v is not None and k not in self.model_fields_set}
        )


# The configuration file


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


P = TypeVar("P", bound=_Part)


class RqServer(_Part):
    """Where RQ's queues are: `url` is its own server, never shown; `queue` the one of flows that name none."""

    url: Annotated[SecretStr, AfterValidator(_rq_url)] | None = None
    queue: Annotated[str, BeforeValidator(_queue)] = "accumulator"


class RqSink(_Part):
    """How a flow's manifests become RQ jobs: in which `queue` (None: RqServer's), and how long (ms) RQ keeps the result
    of a job, which is None, and a job that could not even begin. To keep nothing at all (0) costs RQ more: it asks
    seven times, over one more connection, what there is to delete."""

    queue: Annotated[str, BeforeValidator(_queue)] | None = None
    result_ttl: Annotated[int, BeforeValidator(lambda value: duration_option(value, zero=True))] = 1000
    failure_ttl: Annotated[int, BeforeValidator(duration_option)] = 86_400_000


class WebhookSink(_Part):
    """Where a flow's manifests are posted to. `secret_env` names the environment variable whose text signs them;
    `timeout` is in ms; `private` allows addresses that are not public."""

    url: Annotated[str, BeforeValidator(_endpoint)] = Field(repr=False)
    secret_env: Annotated[str, BeforeValidator(_variable)]
    timeout: Annotated[int, BeforeValidator(_timeout)] = 10_000
    private: bool = Field(False, strict=True)

    def secret(self) -> str:
        """What the environment holds. Raises InvalidSettings where that is nothing."""
        found = os.environ.get(self.secret_env)  # noqa: TID251
        if not found:
            raise InvalidSettings("secret_env", f"names {self.secret_env}, which is not set in the environment")
        return found


_KINDS: Final[dict[str, type[RqSink | WebhookSink]]] = {"rq": RqSink, "webhook": WebhookSink}


def _part(model: type[P], values: object, where: str) -> P:
    """A part of the configuration; InvalidSettings names its field as ``where.option``."""
    if isinstance(values, model):
        return values
    if not isinstance(values, Mapping):
        raise InvalidSettings(where, f"must be a mapping, not {shown(values)}")
    odd = next((name for name in values if not isinstance(name, str)), None)
    if odd is not None:
        raise InvalidSettings(f"{where}.{shown(odd)}", "is unknown")
    try:
        return model(**values)
    except ValidationError as error:
        field, rule = first_problem(error, model.model_fields)
    raise InvalidSettings(f"{where}.{field}", rule)


def _ladders(values: object) -> dict[str, Ladder]:
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise InvalidSettings("ladders", f"must map names to ladders, and is {shown(values)}")
    if len(values) > MAX_FLOWS:
        raise InvalidSettings("ladders", f"must hold at most {MAX_FLOWS} ladders")
    return {name: one if isinstance(one, Ladder) else Ladder.load(name, one) for name, one in values.items()}


def _sinks(values: object, policies: Mapping[str, Policy]) -> dict[str, RqSink | WebhookSink]:
    """Flow → its sink's options. What contradicts the policies of the same file is refused."""
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise InvalidSettings("sinks", f"must map flows to options of their sinks, and is {shown(values)}")
    if len(values) > MAX_FLOWS:
        raise InvalidSettings("sinks", f"must hold at most {MAX_FLOWS} flows")
    found: dict[str, RqSink | WebhookSink] = {}
    for flow, options in values.items():
        problem = flow_problem(flow)
        if problem is not None:
            raise InvalidSettings("sinks", f"{shown(flow)} {problem}")
        found[flow] = _sink(f"sinks.{flow}", options, policies.get(flow))
    for flow, policy in policies.items():
        if policy.sink != "webhook":
            continue
        if not isinstance(found.get(flow, found.get(DEFAULT)), WebhookSink):
            raise InvalidSettings(
                f"sinks.{flow}", "is missing: the policy's sink is webhook, which needs url and secret_env"
            )
        if policy.requery_kinds:
            raise InvalidSettings(
                f"sinks.{flow}", "contradicts the policy's requery_kinds: a webhook loads no official state"
            )
    return found


def _sink(where: str, options: object, policy: Policy | None) -> RqSink | WebhookSink:
    if isinstance(options, RqSink | WebhookSink):
        kinds = ["rq" if isinstance(options, RqSink) else "webhook"]
    else:
        names = set(options) if isinstance(options, Mapping) else set()
        kinds = [kind for kind, model in _KINDS.items() if names & set(model.model_fields)]
    if len(kinds) > 1:
        raise InvalidSettings(where, "mixes options of the sinks rq and webhook")
    sink = policy.sink if policy is not None else None
    if sink is not None and sink not in _KINDS:
        raise InvalidSettings(where, f"must go: the policy's sink is {sink}, which has no options")
    if kinds and sink not in (None, kinds[0]):
        raise InvalidSettings(where, f"has options of the sink {kinds[0]}, and the policy's sink is {sink}")
    kind = kinds[0] if kinds else sink
    if kind is None and isinstance(options, Mapping):
        known = sorted({name for model in _KINDS.values() for name in model.model_fields})
        odd = next(iter(options), None)
        field = where if odd is None else f"{where}.{odd}"
        raise InvalidSettings(field, f"{'is empty' if odd is None else 'is unknown'}: there are {', '.join(known)}")
    return _part(_KINDS[kind or "rq"], options, where)


class Config(BaseModel):
    """What the configuration file says. Raises InvalidSettings, or InvalidPolicy for what a policy says.

    ``policies`` maps each flow, as it stands in a bucket key, or ``default``, to its policy; ``sinks`` likewise to the
    options of its sink. ``max_in_flight`` maps tenants, as they stand in a bucket key, to how many of their manifests
    may be dispatched or processing at a time, ``default`` standing for all others; none means no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    namespace: Annotated[str, AfterValidator(check_namespace)] | None = Field(
        None, description="prefix of every key; the environment's comes first"
    )
    partitions: Annotated[int, BeforeValidator(_partitions)] | None = Field(
        None, description="shares of the key space; the environment's comes first"
    )
    handlers: Annotated[tuple[str, ...], BeforeValidator(_modules)] = Field(
        (), description="modules that register handlers when they are imported"
    )
    policies: dict[str, Policy] = Field({}, description="flow → policy")
    ladders: dict[str, SkipValidation[Ladder]] = Field({}, description="name → ladder of reminders")
    sinks: dict[str, RqSink | WebhookSink] = Field({}, description="flow → options of its sink")
    rq: RqServer = Field(RqServer(), description="RQ's server and usual queue")
    max_in_flight: Annotated[dict[str, int], BeforeValidator(_limits)] = Field(
        {}, description="how many manifests of a tenant may be dispatched or processing: a number, or tenant → number"
    )
    max_unsettled: Annotated[int, BeforeValidator(_ceiling)] = Field(
        1_000_000, description="manifests that may be unsettled before new events are refused"
    )
    max_reconcile: Annotated[int, BeforeValidator(_ceiling)] = Field(
        100_000, description="items that may wait for reconciliation before further ones are refused"
    )

    _path: str | None = PrivateAttr(None)

    def __init__(self, /, **values: Any) -> None:
        policies = values.get("policies")
        if policies is None:
            policies = {}
        if not isinstance(policies, Mapping):
            raise InvalidSettings("policies", f"must map flows to policies, and is {shown(policies)}")
        if len(policies) > MAX_FLOWS:
            raise InvalidSettings("policies", f"must hold at most {MAX_FLOWS} flows")
        read = {f: p if isinstance(p, Policy) else Policy.load(f, p) for f, p in policies.items()}
        rq = values.get("rq")
        parts = {
            "policies": read,
            "ladders": _ladders(values.get("ladders")),
            "sinks": _sinks(values.get("sinks"), read),
            "rq": RqServer() if rq is None else _part(RqServer, rq, "rq"),
        }
        try:
            super().__init__(**(values | parts))
            return
        except ValidationError as error:
            field, rule = first_problem(error, type(self).model_fields)
        raise InvalidSettings(field, rule)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The configuration in the YAML file `path`, of at most 1 MiB; an empty one leaves every default."""
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no such path"
            raise InvalidSettings(str(path), f"can't be read: {reason}") from None
        values = load_yaml(text, str(path))
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise InvalidSettings(str(path), f"must be a mapping, not {shown(values)}")
        odd = next((name for name in values if not isinstance(name, str)), None)
        if odd is not None:
            raise InvalidSettings(shown(odd), "is unknown")
        return cls(**values)

    @property
    def path(self) -> str | None:
        """The file that :func:`find_config` found it in, as it was named; None otherwise."""
        return self._path

    def rq_sink(self, flow: str) -> RqSink:
        """The options of a flow whose sink is `rq`."""
        found = self.sinks.get(flow, self.sinks.get(DEFAULT))
        return found if isinstance(found, RqSink) else RqSink()

    @property
    def webhooks(self) -> dict[str, WebhookSink]:
        """Flow, or ``default`` → where its manifests are posted to."""
        return {flow: sink for flow, sink in self.sinks.items() if isinstance(sink, WebhookSink)}

    @property
    def queues(self) -> tuple[str, ...]:
        """The RQ queues that are used, the usual one first."""
        own = {sink.queue for sink in self.sinks.values() if isinstance(sink, RqSink) and sink.queue is not None}
        return (self.rq.queue, *sorted(own - {self.rq.queue}))


def find_config(settings: Settings, given: Path | None = None) -> Config | None:
    """The configuration of the file that is `given`, else that the environment names, else of `config/accumulator.yaml`
    where that is there."""
    path = given or settings.config or (Path(USUAL_CONFIG) if Path(USUAL_CONFIG).is_file() else None)
    if path is None:
        return None
    config = Config.load(path)
    config._path = str(path)
    return config


# YAML


class _Loader(yaml.SafeLoader):
    """Plain data only. A key that stands twice is refused; merge keys are bounded."""

    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        own: dict[tuple[str, object], tuple[yaml.Node, yaml.Node]] = {}
        sources: list[yaml.Node] = []
        for key, value in node.value:
            name = (key.tag, key.value if isinstance(key, yaml.ScalarNode) else id(key))
            if name in own:
                raise yaml.constructor.ConstructorError(
                    problem=f"{shown(key.value)} stands twice", problem_mark=key.start_mark
                )
            own[name] = (key, value)
            if key.tag == "tag:yaml.org,2002:merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        merged: dict[tuple[str, object], tuple[yaml.Node, yaml.Node]] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    problem="<< takes mappings only", problem_mark=source.start_mark
                )
            self.flatten_mapping(source)
            self.merged += 1 + len(source.value)
            if self.merged > MAX_MERGED:
                raise yaml.constructor.ConstructorError(
                    problem="too much is merged with <<", problem_mark=source.start_mark
                )
            for key, value in source.value:
                name = (key.tag, key.value if isinstance(key, yaml.ScalarNode) else id(key))
                merged.setdefault(name, (key, value))
        pairs = merged | own
        node.value = [pair for (tag, _), pair in pairs.items() if tag != "tag:yaml.org,2002:merge"]


def load_yaml(text: bytes, name: str) -> object:
    """The one document in `text`, as plain data. Raises InvalidSettings: field `name`, line in the rule."""
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidSettings(name, "must be at most 1 MiB")
    try:
        loaded: object = yaml.load(text.decode("utf-8-sig"), _Loader)
        return loaded
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8; byte {error.start} is not"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        rule = f"{where}{(error.problem or error.context or 'is not YAML')[:200]}"
    except yaml.reader.ReaderError as error:
        rule = f"character {error.position} is not allowed in YAML"
    except RecursionError:
        rule = "is nested too deeply"
    # PyYAML's constructors raise these for values such as 2026-13-45 or !!int x.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
        rule = "holds a number, date or tag that YAML can't read"
    raise InvalidSettings(name, rule)
