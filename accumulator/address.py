"""Where the server is: the URLs that we take, read once for everybody.

redis://[user:password@]host[:port][/db]                                   one server
redis+cluster://[user:password@]host[:port][,host[:port]…]                 a Redis Cluster, by some of its nodes
redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db]   what Sentinels watch, by some of them
unix://[user:password@]/path[?db=n]                                        one server, by its socket

`rediss` in place of `redis` is TLS. After a ? stand options of redis-py, and for Sentinels that want credentials of
their own `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlencode, urlsplit

from accumulator.errors import InvalidSettings

Kind = Literal["server", "cluster", "sentinel"]

MAX_HOSTS: Final = 100
_SCHEMES: Final[dict[str, Kind]] = {
    "redis": "server",
    "rediss": "server",
    "unix": "server",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
}
_PORTS: Final[dict[Kind, int]] = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_HINT: Final = "in a password, / ? # @ : and % are percent-encoded (/ is %2F)"
_THREE_SLASHES: Final = "must hold three slashes before the socket: unix:///path"
_UNREADABLE: Final = f"can't be read as a URL; {_HINT}"
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_SERVICE: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, repr=False)
class Address:
    """A URL, read. `hosts` are those that it names: none for a socket. `shown` is what people may see of it: no user,
    password or option. `plain` is how redis-py writes it, with the first host; `service` what the Sentinels call it,
    `sentinel_user` and `sentinel_password` what they want themselves. Holds the password: has no repr."""

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    socket: str
    user: str
    has_password: bool
    database: str
    service: str
    sentinel_user: str | None
    sentinel_password: str | None
    shown: str
    plain: str

    @classmethod
    def of(cls, url: str, setting: str = "redis_url") -> Self:
        """Raises InvalidSettings, which names `setting` and shows nothing of the URL."""
        problem = address_problem(url)
        if problem is not None:
            raise InvalidSettings(setting, problem)
        parts = urlsplit(url)
        kind, unix = _SCHEMES[parts.scheme], parts.scheme == "unix"
        credentials, at, _ = parts.netloc.rpartition("@")
        user, _, password = credentials.partition(":")
        hosts = () if unix else tuple((host, port or _PORTS[kind]) for host, port in _hosts(parts))
        query = parse_qs(parts.query)
        service, database = _path(kind, parts.path)
        plain = url
        if kind != "server":
            host, port = hosts[0]
            name = f"[{host}]" if ":" in host else host
            options = [(k, v) for k, v in parse_qsl(parts.query) if not k.startswith("sentinel_")]
            plain = (
                f"{parts.scheme.partition('+')[0]}://{credentials}{at}{name}:{port}"
                f"{'/' + database if database else ''}{'?' if options else ''}{urlencode(options)}"
            )
        return cls(
            kind,
            parts.scheme.startswith("rediss"),
            hosts,
            unquote(parts.path) if unix else "",
            unquote(user),
            bool(password or query.get("password")),
            query.get("db", [database])[0],
            service,
            query.get("sentinel_username", [None])[0],
            query.get("sentinel_password", [None])[0],
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
            plain,
        )


def address_problem(url: str) -> str | None:
    """Why `url` would be misread, or None. Says nothing of what stands in it."""
    try:
        parts = urlsplit(url)
        kind = _SCHEMES.get(parts.scheme)
        if kind is None:
            return (
                "must begin with redis://, rediss:// or unix://; with redis+cluster:// or redis+sentinel:// for those "
                "(rediss+… for TLS)"
            )
        if parts.fragment or "@" in parts.path + parts.query:
            return _UNREADABLE
        if parts.scheme == "unix":
            return None if parts.path and not parts.netloc.rpartition("@")[2] else _THREE_SLASHES
        hosts = _hosts(parts)
    except ValueError:
        return _UNREADABLE
    if any(not host or port == 0 for host, port in hosts):
        return f"must name a host and, if any, a port; {_HINT}"
    if kind == "server" and len(hosts) > 1:
        return "names several hosts, which is for redis+cluster:// and redis+sentinel://"
    if len(hosts) > MAX_HOSTS:
        return f"must name at most {MAX_HOSTS} hosts"
    return _path_problem(kind, parts)


def _path_problem(kind: Kind, parts: SplitResult) -> str | None:
    service, database = _path(kind, parts.path)
    if kind == "cluster":
        databases = {database, *parse_qs(parts.query).get("db", [])}
        problem = f"may hold nothing after the hosts: a cluster has no databases; {_HINT}"
        return None if databases <= {"", "0"} else problem
    if kind == "sentinel" and not _SERVICE.fullmatch(service):
        return "must name the service that the Sentinels watch: redis+sentinel://host:26379/service"
    if database and not _DIGITS.fullmatch(database):
        after = "host" if kind == "server" else "service"
        return f"may hold nothing but a database number after the {after}; {_HINT}"
    return None


def _hosts(parts: SplitResult) -> list[tuple[str, int | None]]:
    found = []
    for one in parts.netloc.rpartition("@")[2].split(","):
        host = urlsplit(f"//{one}")
        found.append((host.hostname or "", host.port))
    return found


def _path(kind: Kind, path: str) -> tuple[str, str]:
    """The service and the database that a path names; a database may be no number."""
    rest = path.removeprefix("/")
    if kind != "sentinel":
        return "", rest
    service, _, database = rest.partition("/")
    return unquote(service), database
