"""The envelope: one event as a producer gives it, as it is stored, and the digest that says "same content".

**Canonical form and content digest (wire protocol, format 1).** Every language and release must agree on
this; golden vectors: ``tests/golden/digests.json``. The canonical form is one JSON object in UTF-8::

    {"deadline_at":D,"kind":K,"occurred_at":O,"payload":P,"policy_version":V,"ref":R,"source":S,"source_version":N,"weight":W}

- `deadline_at` and `occurred_at` are integer milliseconds since the epoch (a finer part is cut, not rounded).
- `kind`, `occurred_at`, `policy_version`, `source` and `weight` always stand, with their defaults (0 and 1)
  where the producer gave none. `deadline_at`, `payload`, `ref` and `source_version` are left out where
  absent. A payload that is the JSON value null stands as ``"payload":null``.
- A payload of bytes stands as ``"payload_bytes":"<base64, standard alphabet, padded>"`` in place of
  ``"payload"``: a key of the outer object, so no JSON payload can look like it.
- Where a `content_key` is given, the canonical form is ``{"content_key":C}`` and nothing else.
- No spaces. Keys of every object sorted by their UTF-8 bytes (that is by code point, not by UTF-16 unit as in
  RFC 8785).
- Text: only ``"``, ``\\``, and U+0000 to U+001F are escaped: ``\\" \\\\ \\b \\f \\n \\r \\t``, the rest of
  them as ``\\u00xx`` in lower case. Everything else stands as it is, in no normal form.
- A number without fraction and exponent is an integer and is written in full. Any other is a double, written
  as RFC 8785 (ECMAScript ``Number::toString``) does: 1.0 is ``1``, -0.0 is ``0``, 1e21 is ``1e+21``.

The digest is ``"1"`` (the format) + BLAKE2b with 16 bytes of output over the canonical form, unkeyed, in
base64url without padding: 23 characters. Neither `event_id`, `bucket_key`, `received_at` nor `trace` is in
it.

**Payloads.** A JSON payload is dict, list, str, int, float, bool and None, nested up to 128 deep, integers
from -2^63 to 2^64-1, finite floats. Subclasses of these (str and int enumerations, OrderedDict, named tuples
…) and tuples are taken as the plain value. The encoded form is fixed when the Event is made: changing the
object afterwards changes nothing that is sent. Anything else is refused by name; send bytes instead.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from hashlib import blake2b
from math import isfinite
from typing import Annotated, Any, Final, NamedTuple, NoReturn, Self, TypeAlias, TypedDict, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from accumulator.errors import InternalError, InvalidEvent

FIRST_MS: Final = 946_684_800_000  # 2000-01-01T00:00:00Z
LAST_MS: Final = 4_102_444_800_000  # 2100-01-01T00:00:00Z, itself allowed
MAX_DEPTH: Final = 128
MAX_INT31: Final = 2**31 - 1
MAX_INT63: Final = 2**63 - 1


class Missing(Enum):
    """The type of MISSING: no payload at all, which is not the same as None (JSON null)."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing.MISSING


class Packed(NamedTuple):
    """An event as the accept script takes it; every part is bytes.

    mark: ``<occurred_ms> <source_version or -> <digest>``. facts: ``<occurred_ms> <source_version|->
    <policy_version> <deadline_ms|-> <weight> <size> <cut> <kind_bytes> <kind><source>`` (single spaces;
    `kind_bytes` is the length of kind in bytes; kind and source follow each other without separator).
    envelope: the stored JSON. size: the payload's size in bytes as the policy counts it. ``envelope[:cut] +
    b"}"`` is the envelope without its payload; `cut` stands in `facts`.
    """

    event_id: bytes
    mark: bytes
    facts: bytes
    envelope: bytes
    size: int


class StoredFields(TypedDict, total=False):
    """A stored envelope, read back: instants in ms, `payload` as it went in.

    No `payload`: there was none, or it was not kept, or it is purged. `digest` stands where it was not kept.
    """

    event_id: str
    bucket_key: str
    size: int
    weight: int
    kind: str
    occurred_at: int
    source: str
    source_version: int
    policy_version: int
    deadline_at: int
    ref: str
    content_key: str
    trace: str
    payload: Any
    late: bool
    revised: bool
    reconciled: bool
    digest: str


# A payload, encoded: its key in an envelope ("" for none), as stored, in canonical form, and its size.
_Forms: TypeAlias = tuple[str, bytes, bytes, int]
_NO_PAYLOAD: Final[_Forms] = ("", b"", b"", 0)


# --- refusing -------------------------------------------------------------------------------------


def _refuse(field: str, rule: str) -> NoReturn:
    raise InvalidEvent(field, rule)


def _shown(name: str) -> str:
    """A name that somebody else chose, short and without control characters."""
    return (name if name.isprintable() else ascii(name))[:40]


# --- text and integers ----------------------------------------------------------------------------


def _text(field: str, value: object, low: int, high: int) -> str:
    """`value` as a plain str of `low` to `high` bytes of UTF-8, whatever it takes: the slow, exact way."""
    if value is MISSING:
        _refuse(field, "is required")
    if not isinstance(value, str):
        _refuse(field, f"must be text, not {type(value).__name__}")
    text = str.__str__(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        _refuse(field, "is not valid UTF-8: it holds a lone surrogate")
    if size < low:
        _refuse(field, "must not be empty")
    if size > high:
        _refuse(field, f"must be at most {high} bytes of UTF-8, and has {size}")
    return text


def check_event_id(value: object) -> str:
    """The id as text, if it is 1 to 256 bytes of UTF-8; raises InvalidEvent."""
    return _text("event_id", value, 1, 256)


def _integer(field: str, value: object, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field, f"must be an integer, not {type(value).__name__}")
    if not 0 <= value <= high:
        _refuse(field, "must not be negative" if value < 0 else f"must be at most {high}")
    return int.__int__(value)


# W3C Trace Context: version (ff is none), trace and parent id (all zeros are none), flags; lower case only.
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


# --- bucket keys ----------------------------------------------------------------------------------

_CONTROL: Final = r"\x00-\x1f\x7f-\x9f"  # Unicode's category Cc
_KEY = re.compile(rf"[^:{_CONTROL}]++(?::[^:{_CONTROL}]++){{2,}}+")
_KEY_BYTES: Final = 512
_ESCAPED = re.compile(rf"[:%{_CONTROL}]")
_ESCAPES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def _key_fault(key: str) -> NoReturn:
    if re.search(f"[{_CONTROL}]", key):
        _refuse("bucket_key", "must not hold control characters")
    if "" in key.split(":"):
        _refuse("bucket_key", "has an empty part")
    _refuse("bucket_key", "must have at least three parts, as tenant:flow:object_id")


def check_bucket_key(value: object) -> str:
    """`value`, if it is a bucket key; else InvalidEvent (field `bucket_key`)."""
    key = _text("bucket_key", value, 1, _KEY_BYTES)
    if _KEY.fullmatch(key) is None:
        _key_fault(key)
    return key


def bucket_key(tenant: str, flow: str, object_id: str, *more: str) -> str:
    """The bucket key of these parts, e.g. ``acme:order:1234``; no two different tuples give the same key.

    ``:``, ``%`` and control characters inside a part are percent-encoded (as UTF-8 bytes, upper case);
    everything else stays byte for byte. Raises InvalidEvent (field `bucket_key`) for an empty part, one that
    is no text, a lone surrogate, or more than 512 bytes in all.
    """
    parts = []
    for part in (tenant, flow, object_id, *more):
        if not isinstance(part, str):
            _refuse("bucket_key", f"each part must be text, not {type(part).__name__}")
        if not part:
            _refuse("bucket_key", "has an empty part")
        parts.append(_ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), part))
    return _text("bucket_key", ":".join(parts), 1, _KEY_BYTES)


def split_bucket_key(key: str) -> tuple[str, ...]:
    """The parts of a bucket key, decoded: ``split_bucket_key(bucket_key(*parts)) == parts``.

    A key may come from elsewhere: percent signs that encode no UTF-8 stay as they stand.
    """

    def decode(found: re.Match[str]) -> str:
        try:
            return bytes.fromhex(found[0].replace("%", "")).decode()
        except UnicodeDecodeError:
            return found[0]

    return tuple(_ESCAPES.sub(decode, part) for part in key.split(":"))


def tenant_of(bucket_key: str) -> str:
    """First part of a bucket key, as it stands there (percent-encoded)."""
    return bucket_key.split(":", 1)[0]


def flow_of(bucket_key: str) -> str:
    """Second part of a bucket key, as it stands there (percent-encoded)."""
    return bucket_key.split(":", 2)[1]


# --- instants -------------------------------------------------------------------------------------

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Subtracting one of these is 8 times faster than replace().
_MICROS: Final = tuple(timedelta(0, 0, n) for n in range(1000))
_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ](?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?"
    r"([Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
)


def _instant(field: str, value: object) -> tuple[datetime, int]:
    """`value` as datetime in UTC and as ms, both cut to the millisecond."""
    moment = value if isinstance(value, datetime) else _instant_of_text(field, value)
    usual = moment.tzinfo is UTC and type(moment) is datetime  # nothing to ask or convert
    if not usual and moment.utcoffset() is None:
        _refuse(field, "must carry an offset: a naive datetime is no instant")
    delta = moment - _EPOCH
    ms = delta.days * 86_400_000 + delta.seconds * 1000 + delta.microseconds // 1000
    if not FIRST_MS <= ms <= LAST_MS:
        hint = " (seconds where milliseconds belong?)" if 0 <= ms < FIRST_MS else ""
        _refuse(field, f"must lie between 2000-01-01 and 2100-01-01 UTC{hint}")
    if usual:
        return moment - _MICROS[moment.microsecond % 1000], ms
    return _EPOCH + timedelta(0, 0, 0, ms), ms


def parse_instant(field: str, value: object) -> int:
    """ms of a datetime with offset, or of RFC 3339 text; cut to the millisecond. Raises InvalidEvent with `field`."""
    return _instant(field, value)[1]


def _instant_of_text(field: str, value: object) -> datetime:
    if value is MISSING:
        _refuse(field, "is required")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _refuse(field, "is a bare number: give a datetime with offset, or RFC 3339 text")
    if not isinstance(value, str):
        _refuse(field, f"must be a datetime with offset or RFC 3339 text, not {type(value).__name__}")
    match = _RFC3339.fullmatch(value)
    if match is None:
        _refuse(field, "is not an RFC 3339 instant such as 2026-10-16T14:00:00.250Z")
    if match[1] is None:
        _refuse(field, "must carry an offset: Z or ±hh:mm")
    try:
        return datetime.fromisoformat(value.upper())
    except ValueError:
        _refuse(field, "names a date or time that does not exist")


# --- payloads -------------------------------------------------------------------------------------

_TOO_DEEP: Final = f"must not be nested deeper than {MAX_DEPTH}"
_BYTES: Final = (bytes, bytearray, memoryview)
_INT_RANGE: Final = "holds an integer outside -2^63 … 2^64-1"


def _scan(value: Any, depth: int = 1) -> int:
    """A quick look at a dict or list: 0 plain, 1 plain with doubles in it that orjson writes otherwise than RFC 8785, 2
    something else is in it."""
    if depth > MAX_DEPTH:
        _refuse("payload", _TOO_DEEP)
    found = 0
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if kind is str or kind is int:
            continue
        if kind is dict or kind is list:
            found |= _scan(item, depth + 1)
        elif kind is float:
            if (1e-4 < item < 1e15 or -1e15 < item < -1e-4) and not item.is_integer():
                continue  # orjson writes these as RFC 8785 does
            if not isfinite(item):
                return 2
            found |= 1
        elif item is not None and kind is not bool:
            return 2
    return found


def _plain(value: Any, depth: int = 1) -> Any:
    """A copy of exactly dict, list, str, int, float, bool and None, or the refusal by name."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse("payload", "is not valid UTF-8: it holds a lone surrogate")
        return text
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            _refuse("payload", _INT_RANGE)
        return int.__int__(value)
    if isinstance(value, float):
        if not isfinite(value):
            _refuse("payload", "holds NaN or Infinity")
        return float.__float__(value)
    if not isinstance(value, dict | list | tuple):
        hint = "; only a whole payload may be bytes" if isinstance(value, _BYTES) else ""
        _refuse("payload", f"holds a value of type {type(value).__name__}, which is not JSON{hint}")
    if depth > MAX_DEPTH:
        _refuse("payload", _TOO_DEEP)
    if not isinstance(value, dict):
        items = []
        for item in value:  # no comprehensions here: each would be one more frame a level
            items.append(_plain(item, depth + 1))  # noqa: PERF401
        return items
    fields = {}
    for key, item in value.items():
        if not isinstance(key, str):
            _refuse("payload", f"holds a key that is no text but {type(key).__name__}")
        fields[_plain(key)] = _plain(item, depth + 1)
    return fields


def number_text(number: float) -> str:
    """A finite double as RFC 8785 writes it: the shortest digits that read back, in ECMAScript's layout."""
    if not number:
        return "0"
    text = repr(number)  # the same digits; only the layout differs
    mantissa, exponent, power = text.partition("e")
    if not exponent:
        return text.removesuffix(".0")
    sign = "-" if number < 0 else ""
    digits = mantissa.lstrip("-").replace(".", "")
    point = int(power) + 1  # how many digits stand before the decimal point
    if len(digits) <= point <= 21:
        return f"{sign}{digits:0<{point}}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1:+}"


def _numbers(value: Any) -> Any:
    """A copy with each double as what orjson writes the way RFC 8785 does."""
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) is str or type(item) is int else _numbers(item) for key, item in value.items()}
    if kind is list:
        return [_numbers(item) for item in value]
    if kind is float:
        if -(2**53) < value < 2**53 and value.is_integer():
            return int(value)
        return orjson.Fragment(number_text(value))
    return value


def _encode(value: Any) -> tuple[Any, _Forms]:
    """A payload as plain value, and its encoded forms. Raises InvalidEvent (field `payload`)."""
    kind = type(value)
    if kind is dict or kind is list:
        found = _scan(value)
    elif value is MISSING:
        return value, _NO_PAYLOAD
    elif isinstance(value, _BYTES):
        raw = bytes(value)
        text = b'"%b"' % b2a_base64(raw, newline=False)
        return raw, ("payload_bytes", text, text, len(raw))
    else:
        found = _scan((value,))
    stored = None
    if found < 2:
        try:  # noqa: SIM105 - suppress() costs half a microsecond
            stored = orjson.dumps(value)
        except TypeError:
            pass  # a lone surrogate, a key or an integer out of range: _plain says which
    if stored is None:
        value = _plain(value)
        stored = orjson.dumps(value)
    exact = _numbers(value) if found else value
    return value, ("payload", stored, orjson.dumps(exact, option=orjson.OPT_SORT_KEYS), len(stored))


def canonical_json(value: Any) -> bytes:
    """The canonical form of one JSON value, UTF-8. Raises InvalidEvent (field `payload`)."""
    return _encode(_plain(value))[1][2]


# --- the event ------------------------------------------------------------------------------------

_DEFAULTS: Final[dict[str, Any]] = {
    "event_id": MISSING,
    "bucket_key": MISSING,
    "kind": MISSING,
    "occurred_at": MISSING,
    "source": MISSING,
    "source_version": None,
    "policy_version": 0,
    "deadline_at": None,
    "weight": 1,
    "payload": MISSING,
    "ref": None,
    "content_key": None,
    "trace": None,
}
_URLSAFE: Final = bytes.maketrans(b"+/", b"-_")

# Slots of a pydantic model, set as model_construct does but without its loop over the fields.
_set_dict: Callable[[BaseModel, dict[str, Any]], None] = BaseModel.__dict__["__dict__"].__set__
_set_given: Callable[[BaseModel, set[str]], None] = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra: Callable[[BaseModel, None], None] = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private: Callable[[BaseModel, None], None] = BaseModel.__dict__["__pydantic_private__"].__set__


def _fill(event: Event, values: dict[str, Any], given: Iterable[str]) -> None:
    _set_dict(event, values)
    _set_given(event, set(given))
    _set_extra(event, None)
    _set_private(event, None)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of an event, each checked: in plain code, since a strict model takes twice the time."""
    values: dict[Any, Any] = {**_DEFAULTS, **given}
    if len(values) > len(_DEFAULTS):
        values.pop("received_at", None)  # stamped by the server, whatever a producer says
        for name in values:
            if name not in _DEFAULTS:
                _refuse(_shown(name) if isinstance(name, str) else "event", "is not a field of the envelope")

    # fmt: off
    (event_id, key, kind, occurred, source, source_version, policy_version,
     deadline, weight, payload, ref, content_key, trace) = values.values()
    # fmt: on

    # ASCII text has as many bytes as characters: the usual case is settled without a call.
    if type(event_id) is not str or not event_id.isascii() or not 0 < len(event_id) <= 256:
        values["event_id"] = _text("event_id", event_id, 1, 256)
    if type(key) is not str or not key.isascii() or not 0 < len(key) <= _KEY_BYTES:
        values["bucket_key"] = key = _text("bucket_key", key, 1, _KEY_BYTES)
    if _KEY.fullmatch(key) is None:
        _key_fault(key)
    if type(kind) is not str or not kind.isascii() or not 0 < len(kind) <= 128:
        values["kind"] = _text("kind", kind, 1, 128)
    values["occurred_at"], values["_occurred_ms"] = _instant("occurred_at", occurred)
    if type(source) is not str or not source.isascii() or not 0 < len(source) <= 128:
        values["source"] = _text("source", source, 1, 128)

    if source_version is not None and (type(source_version) is not int or not 0 <= source_version <= MAX_INT63):
        values["source_version"] = _integer("source_version", source_version, MAX_INT63)
    if type(policy_version) is not int or not 0 <= policy_version <= MAX_INT31:
        values["policy_version"] = _integer("policy_version", policy_version, MAX_INT31)
    values["_deadline_ms"] = None
    if deadline is not None:
        values["deadline_at"], values["_deadline_ms"] = _instant("deadline_at", deadline)
    if type(weight) is not int or not 0 <= weight <= MAX_INT31:
        values["weight"] = _integer("weight", weight, MAX_INT31)

    values["payload"], values["_forms"] = _encode(payload)
    if ref is not None:
        values["ref"] = _text("ref", ref, 0, 512)
    if content_key is not None:
        values["content_key"] = _text("content_key", content_key, 0, 256)
    if trace is not None:
        values["trace"] = trace = _text("trace", trace, 0, 55)
        if _TRACE.fullmatch(trace) is None:
            _refuse("trace", "is not a W3C traceparent")
    return values


def _forms(values: dict[str, Any]) -> _Forms:
    """The payload's forms; an event that came from the server has them made when they are asked for."""
    forms: _Forms | None = values.get("_forms")
    if forms is None:
        forms = values["_forms"] = _encode(values["payload"])[1]
    return forms


def _canonical(values: dict[str, Any]) -> bytes:
    key, _, canonical, _ = _forms(values)
    facts: dict[str, Any] = {}  # filled in the order of the sorted keys
    if values["_deadline_ms"] is not None:
        facts["deadline_at"] = values["_deadline_ms"]
    facts["kind"] = values["kind"]
    facts["occurred_at"] = values["_occurred_ms"]
    if key:
        facts[key] = orjson.Fragment(canonical)
    facts["policy_version"] = values["policy_version"]
    if values["ref"] is not None:
        facts["ref"] = values["ref"]
    facts["source"] = values["source"]
    if values["source_version"] is not None:
        facts["source_version"] = values["source_version"]
    facts["weight"] = values["weight"]
    return orjson.dumps(facts)


def _pack(event: Event) -> Packed:
    values = event.__dict__
    key, stored, _, size = _forms(values)
    kind, source, weight = values["kind"], values["source"], values["weight"]
    occurred, version = values["_occurred_ms"], values["source_version"]
    policy, deadline = values["policy_version"], values["_deadline_ms"]
    head: dict[str, Any] = {
        "size": size,
        "weight": weight,
        "kind": kind,
        "occurred_at": occurred,
        "source": source,
    }
    if version is not None:
        head["source_version"] = version
    if policy:
        head["policy_version"] = policy
    if deadline is not None:
        head["deadline_at"] = deadline
    if values["ref"] is not None:
        head["ref"] = values["ref"]
    if values["content_key"] is not None:
        head["content_key"] = values["content_key"]
    if values["trace"] is not None:
        head["trace"] = values["trace"]
    envelope = orjson.dumps(head)
    cut = len(envelope) - 1
    if key:
        envelope = b'%b,"%b":%b}' % (envelope[:-1], key.encode(), stored)
    order = "-" if version is None else version
    due = "-" if deadline is None else deadline
    length = len(kind) if kind.isascii() else len(kind.encode())
    return Packed(
        values["event_id"].encode(),
        f"{occurred} {order} {event.content_digest}".encode(),
        f"{occurred} {order} {policy} {due} {weight} {size} {cut} {length} {kind}{source}".encode(),
        envelope,
        size,
    )


class Event(BaseModel):
    """One fact a producer delivers. Immutable; equal and hashable by value.

    ``Event(event_id="e1", bucket_key="acme:order:7", kind="paid", occurred_at=datetime.now(UTC),
    source="shop")``.

    Instants are given as a datetime with offset or as RFC 3339 text with offset, and kept as datetime in UTC,
    cut to the millisecond. `payload` is a JSON value, bytes, or MISSING (none; None is JSON null). A
    `received_at` is ignored; any other unknown field is refused. Raises InvalidEvent with field and rule.
    """

    # The constraints are for the JSON schema; every way of making an Event from data runs through _checked().
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, ser_json_bytes="base64"
    )

    event_id: Annotated[str, Field(min_length=1, max_length=256)]
    bucket_key: Annotated[str, Field(min_length=1, max_length=512)]
    kind: Annotated[str, Field(min_length=1, max_length=128)]
    occurred_at: datetime
    source: Annotated[str, Field(min_length=1, max_length=128)]
    source_version: Annotated[int, Field(ge=0, le=MAX_INT63)] | None = None
    policy_version: Annotated[int, Field(ge=0, le=MAX_INT31)] = 0
    deadline_at: datetime | None = None
    weight: Annotated[int, Field(ge=0, le=MAX_INT31)] = 1
    payload: Any = Field(default_factory=lambda: MISSING)
    ref: Annotated[str, Field(max_length=512)] | None = None
    content_key: Annotated[str, Field(max_length=256)] | None = None
    trace: Annotated[str, Field(min_length=55, max_length=55)] | None = None

    def __init__(self, /, **data: Any) -> None:
        _fill(self, _checked(data), data)

    @classmethod
    def of(cls, event: Event | Mapping[str, Any], index: int | None = None) -> Event:
        """The event itself, or one made of a mapping. `index`: its position in a list, for the error."""
        if type(event) is not dict:
            if isinstance(event, Event):
                return event
            if not isinstance(event, Mapping):
                raise InvalidEvent("event", f"must be an Event or a mapping, not {type(event).__name__}", index)
        try:
            values = _checked(event)
        except InvalidEvent as error:
            raise InvalidEvent(error.field, error.rule, index) from None
        made = cls.__new__(cls)
        _fill(made, values, event)
        return made

    @classmethod
    def from_stored(cls, event_id: bytes | str, bucket_key: str, envelope: bytes) -> tuple[Event, bool, bool]:
        """An event as the server kept it, not checked again, and whether it is flagged late, and revised.

        Where the payload was not kept (`keep: last`) the envelope names the digest of the whole event.
        """
        stored = unpack(event_id, envelope, bucket_key)
        late, revised = stored.pop("late", False), stored.pop("revised", False)
        digest, reconciled = stored.pop("digest", None), stored.pop("reconciled", False)
        stored.pop("size", None)
        values: dict[str, Any] = {**_DEFAULTS, **stored}
        occurred, deadline = values["occurred_at"], values["deadline_at"]
        values["_occurred_ms"], values["_deadline_ms"] = occurred, deadline
        values["occurred_at"] = _EPOCH + timedelta(0, 0, 0, occurred)
        if deadline is not None:
            values["deadline_at"] = _EPOCH + timedelta(0, 0, 0, deadline)
        made = cls.__new__(cls)
        _fill(made, values, stored)
        if digest is not None:
            made.__dict__["_digest"] = digest
        if reconciled:
            made.__dict__["_reconciled"] = True
        return made, late, revised

    @property
    def reconciled(self) -> bool:
        """Whether it was stored by a resolution of the reconciliation queue."""
        return "_reconciled" in self.__dict__

    @property
    def occurred_ms(self) -> int:
        """`occurred_at` in milliseconds since the epoch."""
        ms: int = self.__dict__["_occurred_ms"]
        return ms

    @property
    def deadline_ms(self) -> int | None:
        """`deadline_at` in milliseconds since the epoch."""
        ms: int | None = self.__dict__["_deadline_ms"]
        return ms

    @property
    def tenant(self) -> str:
        """First part of the bucket key, as it stands there (percent-encoded)."""
        return self.bucket_key.partition(":")[0]

    @property
    def flow(self) -> str:
        """Second part of the bucket key, as it stands there (percent-encoded): it selects the policy."""
        return self.bucket_key.split(":", 2)[1]

    @property
    def canonical(self) -> bytes:
        """The canonical form that the digest is made of (see the module's docstring)."""
        if self.content_key is not None:
            return orjson.dumps({"content_key": self.content_key})
        return _canonical(self.__dict__)

    @property
    def content_digest(self) -> str:
        """What says "same content": 23 characters, the first one the format. Computed once."""
        digest: str | None = self.__dict__.get("_digest")
        if digest is None:
            raw = blake2b(self.canonical, digest_size=16).digest()
            digest = "1" + b2a_base64(raw)[:22].translate(_URLSAFE).decode()
            self.__dict__["_digest"] = digest
        return digest

    @property
    def packed(self) -> Packed:
        """The event as the server takes it. Computed once."""
        packed: Packed | None = self.__dict__.get("_packed")
        if packed is None:
            packed = self.__dict__["_packed"] = _pack(self)
        return packed

    def __eq__(self, other: object) -> bool:
        """Same id, bucket, content (as in the digest: 1 and 1.0 are one number), content_key and trace."""
        if not isinstance(other, Event):
            return NotImplemented
        return self is other or self._value() == other._value()

    def __hash__(self) -> int:
        return hash((self.event_id, self.bucket_key, self.content_digest))

    def _value(self) -> tuple[object, ...]:
        # The digest too: an event whose payload was not kept still knows it.
        return (
            self.event_id,
            self.bucket_key,
            self.content_key,
            self.trace,
            self.content_digest,
            _canonical(self.__dict__),
        )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """No payload, bucket key or reference: a repr ends up in logs."""
        yield from ((name, getattr(self, name)) for name in ("event_id", "kind", "source"))
        yield "occurred_at", self.occurred_at.isoformat()

    def __str__(self) -> str:
        return repr(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """This event with other values, checked like any event (pydantic's own would not check them)."""
        return type(self)(**{**dict(self), **(update or {})})

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        if self.payload is MISSING:
            dumped.pop("payload", None)
        return dumped


def unpack(event_id: bytes | str, envelope: bytes, bucket_key: str) -> StoredFields:
    """The fields of a stored envelope, `payload` restored. Raises InternalError if no release wrote it."""
    try:
        stored = orjson.loads(envelope)
        if not isinstance(stored, dict):
            raise TypeError
        if "payload_bytes" in stored:
            stored["payload"] = b64decode(stored.pop("payload_bytes"))
    except (ValueError, TypeError):
        raise InternalError("a stored envelope can't be read") from None
    stored["event_id"] = event_id if isinstance(event_id, str) else event_id.decode()
    stored["bucket_key"] = bucket_key
    return cast(StoredFields, stored)


def packed_again(event: Event) -> tuple[bytes, bytes, bytes, bytes]:
    """Id, mark, facts and envelope of an event that was read back. One whose payload was not kept has its digest in the
    envelope, since it can't be computed again."""
    event_id, mark, facts, envelope, _ = event.packed
    again, _, _ = Event.from_stored(event_id, event.bucket_key, envelope)
    if again.content_digest != event.content_digest:
        envelope = b'%b,"digest":"%b"}' % (envelope[:-1], event.content_digest.encode())
    return event_id, mark, facts, envelope


# --- lines of files -------------------------------------------------------------------------------

_DIGITS: Final = bytes.maketrans(b"0123456789", b"0000000000")
_LONG_RUN: Final = b"0" * 19  # the shortest run of digits that may not fit into 64 bits
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def _constant(name: str) -> NoReturn:
    raise InvalidEvent("line", f"is not JSON: {name} is no JSON number")


def _big_integer(digits: str) -> int:
    # Python refuses to read more than some thousand digits; which number it is does not matter out there.
    return int(digits) if len(digits) < 30 else 10**30


def _check_depth(text: str) -> None:
    """Refuses text nested so deep that no event can be in it, by the top-level field that holds it."""
    depth = 0
    field = ""
    for token in _TOKEN.findall(text):
        if token in "[{":
            depth += 1
            if depth > MAX_DEPTH + 1:
                # In text that is no JSON it may be anything, so only a field's name is repeated.
                raise InvalidEvent(field if field in _DEFAULTS else "line", _TOO_DEEP)
        elif token in "]}":
            depth -= 1
        elif depth == 1:
            field = token.strip('"')


def parse_json_line(line: bytes) -> dict[str, Any]:
    """One line of a file, strict JSON in UTF-8, as a mapping for :meth:`Event.of`.

    Integers of any size stay exact (so that one out of range is refused, not rounded); NaN, Infinity and
    nesting beyond what an event may have are refused. Of a key given twice the last one counts. Raises
    InvalidEvent: field `line` where the text as a whole is at fault, else the event's field.
    """
    parsed: Any
    try:
        if _LONG_RUN in line.translate(_DIGITS):
            raise ValueError  # orjson would round a larger one
        parsed = orjson.loads(line)
    except ValueError:
        # The exact and slower way, which also says what is wrong.
        try:
            text = line.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise InvalidEvent("line", f"is not valid UTF-8 at byte {error.start}") from None
        _check_depth(text)
        try:
            parsed = json.loads(text, parse_constant=_constant, parse_int=_big_integer)
        except json.JSONDecodeError as error:
            raise InvalidEvent("line", f"is not JSON: {error.msg} (character {error.pos})") from None
    if not isinstance(parsed, dict):
        raise InvalidEvent("line", "is not a JSON object")
    return parsed
