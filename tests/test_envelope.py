"""The envelope: each rule from both sides, the canonical form and its golden vectors, storing and reading."""

from __future__ import annotations

import base64
import copy
import enum
import json
import math
import os
import pickle
import re
import struct
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from accumulator import errors
from accumulator.envelope import (
    FIRST_MS,
    LAST_MS,
    MISSING,
    Event,
    bucket_key,
    canonical_json,
    number_text,
    parse_json_line,
    split_bucket_key,
    unpack,
)
from accumulator.errors import AccumulatorError, InternalError, InvalidEvent, InvalidInput

GOLDEN = Path(__file__).parent / "golden" / "digests.json"
WHEN = datetime(2026, 10, 16, 14, 0, 0, 250_000, tzinfo=UTC)
WHEN_MS = 1_792_159_200_250
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BASE: dict[str, Any] = {
    "event_id": "e1",
    "bucket_key": "acme:order:7",
    "kind": "item_added",
    "occurred_at": WHEN,
    "source": "shop",
}
FULL: dict[str, Any] = {
    **BASE,
    "source_version": 17,
    "policy_version": 3,
    "deadline_at": WHEN + timedelta(hours=1),
    "weight": 5,
    "payload": {"b": [1, 2.5, None], "a": "é"},
    "ref": "s3://records/7",
    "content_key": "order-7-v17",
    "trace": TRACE,
}


def make(**changes: Any) -> Event:
    return Event.of({**BASE, **changes})


def refused(mapping: Any, field: str, rule: str) -> None:
    """`mapping` is refused by field and rule, by both ways of making an event."""
    with pytest.raises(InvalidEvent, match=re.escape(rule)) as caught:
        Event.of(mapping, index=3)
    assert (caught.value.field, caught.value.index) == (field, 3)
    assert str(caught.value) == f"event 3: {field}: {caught.value.rule}"
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    if isinstance(mapping, dict) and all(isinstance(name, str) for name in mapping):
        with pytest.raises(InvalidEvent, match=re.escape(rule)) as caught:
            Event(**mapping)
        assert (caught.value.field, caught.value.index) == (field, None)


def refuse(field: str, value: Any, rule: str) -> None:
    refused({**BASE, field: value}, field, rule)


# --- which fields there are -----------------------------------------------------------------------


def test_a_full_event_is_taken_as_given() -> None:
    event = Event.of(FULL)
    assert dict(event) == FULL
    assert Event(**FULL) == event
    assert (event.occurred_ms, event.deadline_ms) == (WHEN_MS, WHEN_MS + 3_600_000)
    assert (event.tenant, event.flow) == ("acme", "order")


def test_defaults() -> None:
    event = make()
    assert (event.policy_version, event.weight, event.payload) == (0, 1, MISSING)
    for field in ("source_version", "deadline_at", "ref", "content_key", "trace"):
        assert getattr(event, field) is None
    assert event.deadline_ms is None
    assert event.model_fields_set == set(BASE)


@pytest.mark.parametrize("field", list(BASE))
def test_required_fields(field: str) -> None:
    refused({name: value for name, value in BASE.items() if name != field}, field, "is required")


@pytest.mark.parametrize("field", ["source_version", "deadline_at", "ref", "content_key", "trace"])
def test_an_optional_field_may_be_null(field: str) -> None:
    assert make(**{field: None}) == make()


@pytest.mark.parametrize("field", [*BASE, "policy_version", "weight"])
def test_other_fields_may_not(field: str) -> None:
    refuse(field, None, "not NoneType")


def test_received_at_is_ignored_whatever_it_is() -> None:
    for value in (WHEN, "nonsense", None, 5, float("nan")):
        event = make(received_at=value)
        assert event == make()
        assert "received_at" not in dict(event)


def test_unknown_fields_are_refused_by_name() -> None:
    refused({**BASE, "bucketkey": "x"}, "bucketkey", "is not a field of the envelope")
    refused({**BASE, "received_at": WHEN, "_occurred_ms": 5}, "_occurred_ms", "is not a field of the envelope")
    refused({**BASE, "x" * 1000: 1}, "x" * 40, "is not a field of the envelope")
    refused({**BASE, "a\nb": 1}, r"'a\nb'", "is not a field of the envelope")
    refused({**BASE, 5: 1}, "event", "is not a field of the envelope")


@pytest.mark.parametrize("other", [None, 5, "text", b"bytes", [("event_id", "e1")], object()])
def test_what_is_no_mapping_is_refused(other: Any) -> None:
    refused(other, "event", f"must be an Event or a mapping, not {type(other).__name__}")


def test_any_mapping_will_do_and_an_event_stays_itself() -> None:
    event = Event.of(UserDict(FULL))
    assert event == Event.of(FULL)
    assert Event.of(event, index=4) is event


def test_what_was_given_is_not_changed() -> None:
    given = {**FULL, "received_at": WHEN}
    kept = copy.deepcopy(given)
    assert Event.of(given).packed
    assert given == kept


# --- text -----------------------------------------------------------------------------------------

BOUNDS = {"event_id": 256, "kind": 128, "source": 128, "ref": 512, "content_key": 256}


@pytest.mark.parametrize(("field", "high"), BOUNDS.items())
def test_text_is_measured_in_bytes_of_utf8(field: str, high: int) -> None:
    for text in ("x" * high, "é" * (high // 2), "客" * (high // 3) + "x" * (high % 3), "🙂" * (high // 4)):
        assert len(text.encode()) == high
        assert getattr(make(**{field: text}), field) == text
        refuse(field, text + "x", f"must be at most {high} bytes of UTF-8, and has {high + 1}")
    refuse(field, "x" * (high - 1) + "é", f"at most {high} bytes")


@pytest.mark.parametrize("field", ["event_id", "bucket_key", "kind", "source"])
def test_required_text_is_not_empty(field: str) -> None:
    refuse(field, "", "must not be empty")


@pytest.mark.parametrize("field", ["ref", "content_key"])
def test_optional_text_may_be_empty_and_is_then_not_absent(field: str) -> None:
    event = make(**{field: ""})
    assert event != make()
    assert event.content_digest != make().content_digest
    assert f'"{field}":""'.encode() in event.packed.envelope


TEXTS = [*BOUNDS, "bucket_key", "trace"]


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("value", [b"bytes", b"\xff\xfe", 5, 1.5, True, ["e1"], {"a": 1}, Decimal(1)])
def test_only_text_is_text(field: str, value: Any) -> None:
    refuse(field, value, f"must be text, not {type(value).__name__}")


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("text", [chr(0xD800), f"a:b:c{chr(0xDFFF)}", chr(0xD83D), chr(0xDCFF)], ids=ascii)
def test_lone_surrogates_are_refused(field: str, text: str) -> None:
    refuse(field, text, "is not valid UTF-8: it holds a lone surrogate")


@pytest.mark.parametrize("field", list(BOUNDS))
@pytest.mark.parametrize(
    "text",
    ["\0", "\n", "a b", "12345678901234567890", "{x}:%", "évt-1", "e\u0301", "\u202eabc", "🙂", "\x85"],
)
def test_text_may_hold_anything_else(field: str, text: str) -> None:
    event = make(**{field: text})
    assert getattr(event, field) == text
    back, _, _ = Event.from_stored(event.event_id.encode(), event.bucket_key, event.packed.envelope)
    assert getattr(back, field) == text


class Kind(enum.StrEnum):
    ADDED = "item_added"


class Number(enum.IntEnum):
    TWO = 2


def test_subclasses_of_text_and_integers_become_plain() -> None:
    event = make(kind=Kind.ADDED, source_version=Number.TWO, weight=Number.TWO, policy_version=Number.TWO)
    assert type(event.kind) is str
    assert {type(event.source_version), type(event.weight), type(event.policy_version)} == {int}
    assert event == make(kind="item_added", source_version=2, weight=2, policy_version=2)
    assert event.packed == make(kind="item_added", source_version=2, weight=2, policy_version=2).packed


# --- integers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "high"), [("source_version", 2**63 - 1), ("policy_version", 2**31 - 1), ("weight", 2**31 - 1)]
)
def test_integers(field: str, high: int) -> None:
    for value in (0, 1, high):
        event = make(**{field: value})
        assert getattr(event, field) == value
        assert getattr(Event.from_stored("e1", event.bucket_key, event.packed.envelope)[0], field) == value
    refuse(field, high + 1, f"must be at most {high}")
    refuse(field, 10**5000, f"must be at most {high}")
    refuse(field, -1, "must not be negative")
    for other in (True, False, 1.0, "1", b"1", Decimal(1), [1]):
        refuse(field, other, f"must be an integer, not {type(other).__name__}")


# --- instants -------------------------------------------------------------------------------------

INSTANTS = ["occurred_at", "deadline_at"]
INSTANT_MS = {"occurred_at": "occurred_ms", "deadline_at": "deadline_ms"}


def ms_of(field: str, value: Any) -> int:
    event = make(**{field: value})
    moment = getattr(event, field)
    ms = getattr(event, INSTANT_MS[field])
    assert type(moment) is datetime
    assert moment.tzinfo is UTC
    assert moment == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    assert isinstance(ms, int)
    return ms


@pytest.mark.parametrize("field", INSTANTS)
@pytest.mark.parametrize(
    "value",
    [
        WHEN,
        WHEN + timedelta(microseconds=999),
        WHEN.astimezone(ZoneInfo("America/Sao_Paulo")),
        WHEN.astimezone(ZoneInfo("UTC")),
        (WHEN + timedelta(microseconds=1)).astimezone(timezone(timedelta(hours=5, minutes=45))),
        WHEN.astimezone(timezone(timedelta(hours=-3, seconds=7))),
        "2026-10-16T14:00:00.250Z",
        "2026-10-16t14:00:00.250z",
        "2026-10-16 14:00:00.250+00:00",
        "2026-10-16T14:00:00.25-00:00",
        "2026-10-16T14:00:00.2509999999Z",
        "2026-10-16T19:45:00.250+05:45",
        "2026-10-15T14:01:00.250-23:59",
    ],
)
def test_instants_are_one_utc_millisecond(field: str, value: Any) -> None:
    assert ms_of(field, value) == WHEN_MS


@pytest.mark.parametrize("field", INSTANTS)
def test_a_finer_part_is_cut_never_rounded(field: str) -> None:
    assert ms_of(field, "2026-10-16T14:00:00.250999Z") == WHEN_MS
    assert ms_of(field, "2026-10-16T14:00:00Z") == WHEN_MS - 250
    assert ms_of(field, WHEN.replace(microsecond=999_999)) == WHEN_MS + 749
    # B042: a producer that counts microseconds keeps its instants, to the millisecond
    assert ms_of(field, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=1)) == 1_767_225_600_000


def test_a_finer_part_does_not_change_the_content() -> None:
    assert make(occurred_at=WHEN + timedelta(microseconds=7)) == make()
    assert make(occurred_at=WHEN + timedelta(microseconds=7)).content_digest == make().content_digest


@pytest.mark.parametrize("field", INSTANTS)
def test_range_of_instants(field: str) -> None:
    first = datetime(2000, 1, 1, tzinfo=UTC)
    last = datetime(2100, 1, 1, tzinfo=UTC)
    rule = "must lie between 2000-01-01 and 2100-01-01 UTC"
    assert ms_of(field, first) == FIRST_MS == 946_684_800_000
    assert ms_of(field, last) == LAST_MS == 4_102_444_800_000
    assert ms_of(field, "1999-12-31T21:00:00-03:00") == FIRST_MS
    assert ms_of(field, last + timedelta(microseconds=999)) == LAST_MS
    refuse(field, first - timedelta(microseconds=1), rule)
    refuse(field, first.replace(tzinfo=timezone(timedelta(minutes=1))), rule)
    refuse(field, last + timedelta(milliseconds=1), rule)
    refuse(field, "2100-01-01T00:00:00.001Z", rule)
    refuse(field, "2286-11-20T17:46:40Z", rule)  # B022
    refuse(field, "0001-01-01T00:00:00+23:59", rule)
    refuse(field, datetime.max.replace(tzinfo=timezone(-timedelta(hours=23))), rule)
    refuse(field, datetime.min.replace(tzinfo=timezone(timedelta(hours=23))), rule)
    with pytest.raises(InvalidEvent) as caught:
        make(**{field: "1969-12-31T00:00:00Z"})
    assert "seconds" not in caught.value.rule


@pytest.mark.parametrize("field", INSTANTS)
def test_seconds_where_milliseconds_belong(field: str) -> None:
    seconds = WHEN_MS // 1000
    refuse(field, datetime.fromtimestamp(seconds / 1000, UTC), "(seconds where milliseconds belong?)")
    for number in (seconds, WHEN_MS, WHEN_MS * 1000, 1.5, 0, -1, float("nan"), 10**400):
        refuse(field, number, "is a bare number: give a datetime with offset")
    refuse(field, str(seconds), "is not an RFC 3339 instant")
    refuse(field, str(WHEN_MS), "is not an RFC 3339 instant")


class NoOffset(tzinfo):
    """A time zone that does not know its offset: Python calls such a datetime naive."""

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        return None

    def dst(self, moment: datetime | None) -> timedelta | None:
        return None

    def tzname(self, moment: datetime | None) -> str | None:
        return None


@pytest.mark.parametrize("field", INSTANTS)
def test_without_offset_there_is_no_instant(field: str) -> None:
    zone = NoOffset()
    assert {zone.utcoffset(None), zone.dst(None), zone.tzname(None)} == {None}
    for value in (
        datetime(2026, 10, 16, 14),
        WHEN.replace(tzinfo=zone),
        "2026-10-16T14:00:00",
        "2026-10-16 14:00:00.250",
    ):
        refuse(field, value, "must carry an offset")


@pytest.mark.parametrize("field", INSTANTS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-10-16",
        "2026-10-16Z",
        "2026-10-16T14:00Z",
        "20261016T140000Z",
        "2026-W42-5T14:00:00Z",
        "2026-10-16T14:00:00,25Z",
        "2026-10-16T14:00:00.Z",
        "2026-10-16T14:00:00+0300",
        "2026-10-16T14:00:00+03",
        "2026-10-16T14:00:00+03:00:30",
        "2026-10-16T24:00:00Z",
        "2026-10-16T14:00:00+24:00",
        "2026-10-16T14:00:00+01:60",
        "2026-10-16T14:00:00Z\n",
        " 2026-10-16T14:00:00Z",
        "+2026-10-16T14:00:00Z",
        "12026-10-16T14:00:00Z",
        "２０２６-10-16T14:00:00Z",
        "2026-10-16T14:00:00Z\ud800",
    ],
)
def test_text_that_is_no_rfc3339_instant(field: str, text: str) -> None:
    refuse(field, text, "is not an RFC 3339 instant")


@pytest.mark.parametrize("field", INSTANTS)
@pytest.mark.parametrize(
    "text",
    [
        "2026-02-29T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "2026-00-10T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "2026-10-16T14:60:00Z",
        "2016-12-31T23:59:60Z",
    ],
)
def test_instants_that_do_not_exist(field: str, text: str) -> None:
    refuse(field, text, "names a date or time that does not exist")


@pytest.mark.parametrize("field", INSTANTS)
@pytest.mark.parametrize("value", [date(2026, 10, 16), True, b"2026-10-16T14:00:00Z", timedelta(1), [], {}])
def test_other_types_are_no_instant(field: str, value: Any) -> None:
    refuse(field, value, f"must be a datetime with offset or RFC 3339 text, not {type(value).__name__}")


def test_a_local_time_that_comes_twice_is_told_apart_by_fold() -> None:
    zone = ZoneInfo("America/New_York")
    first = make(occurred_at=datetime(2026, 11, 1, 1, 30, tzinfo=zone))
    second = make(occurred_at=datetime(2026, 11, 1, 1, 30, tzinfo=zone, fold=1))
    assert second.occurred_ms - first.occurred_ms == 3_600_000


def test_a_subclass_of_datetime_becomes_plain() -> None:
    class Frozen(datetime):
        """As the libraries make that stop or enrich the clock."""

    assert ms_of("occurred_at", Frozen(2026, 10, 16, 14, 0, 0, 250_999, tzinfo=UTC)) == WHEN_MS


_ZONE_SCRIPT = """
import sys
from datetime import datetime, UTC
from accumulator.envelope import Event
from accumulator.errors import InvalidEvent
fields = dict(event_id="e1", bucket_key="acme:order:7", kind="item_added", source="shop")
made = Event(**fields, occurred_at="2026-10-16T14:00:00.250Z", deadline_at=datetime(2026, 10, 17, tzinfo=UTC))
sys.stdout.write(made.packed.mark.decode() + "|" + made.packed.facts.decode())
for naive in (datetime(2026, 10, 16, 14), "2026-10-16T14:00:00"):
    for field in ("occurred_at", "deadline_at"):
        try:
            Event(**{**fields, "occurred_at": made.occurred_at, field: naive})
        except InvalidEvent as error:
            sys.stdout.write("|" + str(error))
"""


def test_the_hosts_time_zone_changes_nothing() -> None:
    """B021: packed and refused alike wherever the producer runs."""
    answers = set()
    for zone in ("UTC", "Asia/Shanghai", "America/Los_Angeles"):
        run = subprocess.run(
            [sys.executable, "-c", _ZONE_SCRIPT],
            env={"TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(run.stdout)
    (answer,) = answers
    assert answer.startswith(f"{WHEN_MS} - 1")
    assert answer.count("must carry an offset") == 4


# --- trace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [TRACE, TRACE.replace("00-", "cc-", 1), TRACE[:-2] + "ff"])
def test_trace(trace: str) -> None:
    assert make(trace=trace).trace == trace


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "x" * 55,
        TRACE.upper(),
        TRACE[:-1],
        TRACE.replace("-", "_"),
        "ff" + TRACE[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        TRACE[:-1] + "\n",
        TRACE[:-1] + "\u0661",
    ],
)
def test_what_is_no_traceparent(trace: str) -> None:
    rule = "is not a W3C traceparent" if len(trace.encode()) <= 55 else "must be at most 55 bytes"
    refuse("trace", trace, rule)


def test_longer_traces_are_refused() -> None:
    refuse("trace", TRACE + "-01", "must be at most 55 bytes")
    refuse("trace", TRACE + "\n", "must be at most 55 bytes")


# --- bucket keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "a:b:c",
        "a:b:c:d:e",
        " x:b: ",
        "{1}:{2}:{3}",
        "客户-Ü-🙂:f:1",
        "a:b:é",
        "a:b:e\u0301",
        "a:b:100%",
        "a:b:%3A",
        "a:b:123/abc",
        "a:b:" + "x" * 508,
        "a:b:" + "é" * 254,
        "a:b:\u2028\u200b\ufeff",
        "a:b:\xa0",
    ],
)
def test_bucket_keys_are_taken_byte_for_byte(key: str) -> None:
    event = make(bucket_key=key)
    assert event.bucket_key == key
    assert (event.tenant, event.flow) == tuple(key.split(":")[:2])


@pytest.mark.parametrize("key", ["a", "a:b", "客户", "a%3Ab%3Ac"])
def test_bucket_keys_have_three_parts(key: str) -> None:
    refuse("bucket_key", key, "must have at least three parts, as tenant:flow:object_id")


@pytest.mark.parametrize("key", [":", "::", ":b:c", "a::c", "a:b:", "a:b:c:", "a:b::d", "a:", "é::c"])
def test_bucket_keys_have_no_empty_part(key: str) -> None:
    refuse("bucket_key", key, "has an empty part")


@pytest.mark.parametrize("code", [0, 1, 9, 10, 13, 27, 31, 127, 128, 133, 159])
def test_bucket_keys_have_no_control_characters(code: int) -> None:
    refuse("bucket_key", f"a:b:c{chr(code)}", "must not hold control characters")
    refuse("bucket_key", f"{chr(code)}a:b:c", "must not hold control characters")
    refuse("bucket_key", f"a:b{chr(code)}:é", "must not hold control characters")


def test_bucket_keys_are_at_most_512_bytes() -> None:
    refuse("bucket_key", "a:b:" + "x" * 509, "must be at most 512 bytes of UTF-8, and has 513")
    refuse("bucket_key", "a:b:x" + "é" * 254, "must be at most 512 bytes of UTF-8, and has 513")


def test_building_bucket_keys() -> None:
    assert bucket_key("acme", "order", "1234") == "acme:order:1234"
    assert bucket_key("a:b", "c%d", "e\nf", "\x85", "é🙂{}") == "a%3Ab:c%25d:e%0Af:%C2%85:é🙂{}"
    assert len(bucket_key("a", "b", "é" * 254)) == 258


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        (("", "b", "c"), "has an empty part"),
        (("a", "b", ""), "has an empty part"),
        (("a", "b", "c", ""), "has an empty part"),
        (("a", "b", 5), "each part must be text, not int"),
        (("a", None, "c"), "each part must be text, not NoneType"),
        (("a", "b", b"c"), "each part must be text, not bytes"),
        (("a", "b", "\ud800"), "is not valid UTF-8"),
        (("a", "b", "x" * 509), "must be at most 512 bytes of UTF-8, and has 513"),
        (("a", "b", ":" * 170), "must be at most 512 bytes of UTF-8, and has 514"),
    ],
)
def test_parts_that_make_no_bucket_key(parts: tuple[Any, ...], rule: str) -> None:
    with pytest.raises(InvalidEvent, match=rule) as caught:
        bucket_key(*parts)
    assert caught.value.field == "bucket_key"


LOOK_ALIKES = [
    (("t", "f", "a|b", "c"), ("t", "f", "a", "b|c")),
    (("t", "f", "a:b", "c"), ("t", "f", "a", "b:c")),
    (("t", "f", "a:b"), ("t", "f", "a", "b")),
    (("t", "f", "a%3Ab"), ("t", "f", "a:b")),
    (("t", "f", "%"), ("t", "f", "%25")),
    (("t", "f", " x"), ("t", "f", "x")),
    (("t", "f", "X"), ("t", "f", "x")),
    (("t", "f", "é"), ("t", "f", "e\u0301")),
    (("t", "f", "123/abc"), ("t", "f", "123/def")),
    (("t", "f", "\x85"), ("t", "f", "%C2%85")),
]


@pytest.mark.parametrize(("left", "right"), LOOK_ALIKES)
def test_look_alikes_stay_apart(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    """B037"""
    assert bucket_key(*left) != bucket_key(*right)
    assert make(bucket_key=bucket_key(*left)) != make(bucket_key=bucket_key(*right))
    assert split_bucket_key(bucket_key(*left)) == left
    assert split_bucket_key(bucket_key(*right)) == right


def test_splitting_a_key_from_elsewhere() -> None:
    assert split_bucket_key("a:b:100%") == ("a", "b", "100%")
    assert split_bucket_key("a:b:%zz%FF%3a%C3%28") == ("a", "b", "%zz%FF%3a%C3%28")
    assert split_bucket_key("a:b:%C3%A9%") == ("a", "b", "é%")
    assert split_bucket_key("one") == ("one",)


part_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
plain_parts = st.one_of(part_texts, st.text(":%A3\n\x85é", min_size=1, max_size=6))


@settings(max_examples=200)
@given(plain_parts, plain_parts, plain_parts, st.lists(plain_parts, max_size=2))
def test_built_keys_are_valid_and_come_apart_again(a: str, b: str, c: str, more: list[str]) -> None:
    key = bucket_key(a, b, c, *more)
    assert make(bucket_key=key).bucket_key == key
    assert split_bucket_key(key) == (a, b, c, *more)


# --- payloads -------------------------------------------------------------------------------------


def stored_again(event: Event) -> Event:
    back, late, revised = Event.from_stored(event.packed.event_id, event.bucket_key, event.packed.envelope)
    assert (late, revised) == (False, False)
    assert back == event
    assert hash(back) == hash(event)
    assert back.content_digest == event.content_digest
    assert back.packed == event.packed
    assert (back.occurred_at, back.deadline_at) == (event.occurred_at, event.deadline_at)
    return back


def exact(value: Any) -> str:
    """Python's own picture of a JSON value, types and signs of zero included."""
    return repr(value)


PAYLOADS: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    "",
    "text",
    [],
    {},
    1.5,
    -0.0,
    1.0,
    1e21,
    5e-324,
    1.7976931348623157e308,
    -(2**63),
    2**64 - 1,
    2**53 + 1,
    {"id": 9007199254740993, "u": 18446744073709551615, "m": 0.1, "e": 1e21, "z": -0.0},  # B042
    {"items": [], "meta": {}, "n": None, "nested": [[], {}]},  # B043
    {"": {"": ""}, "\0": "\0", "z": 1, "a": 2},
    {"rtl": "\u202eمرحبا", "emoji": "🙂👩‍👩‍👧", "é": "e\u0301", "\u2028": "\x7f"},
    [[[[[[]]]]]],
    {"late": True, "payload": 1, "payload_bytes": "AA==", "size": 0},
    '","payload":1',
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
def test_json_payloads_come_out_as_they_went_in(payload: Any) -> None:
    event = make(payload=payload)
    assert exact(event.payload) == exact(payload)
    assert exact(stored_again(event).payload) == exact(payload)
    assert event.packed.size == len(orjson.dumps(payload))


def test_the_stored_text_is_byte_equal_to_the_compact_one() -> None:
    """B042, B043: key order, integers and doubles as they were."""
    text = b'{"z":18446744073709551615,"a":[],"m":{},"f":0.1,"n":null,"i":-9223372036854775808}'
    event = make(payload=json.loads(text))
    assert event.packed.envelope.endswith(b',"payload":' + text + b"}")
    assert event.packed.size == len(text)


@pytest.mark.parametrize("raw", [b"", b"\0", b"\xff\xfe", b"null", bytes(range(256))])
def test_bytes_come_out_as_they_went_in(raw: bytes) -> None:
    event = make(payload=raw)
    assert event.payload == raw
    back = stored_again(event)
    assert type(back.payload) is bytes
    assert back.payload == raw
    assert event.packed.size == len(raw)
    for other in (bytearray(raw), memoryview(raw)):
        same = make(payload=other)
        assert type(same.payload) is bytes
        assert same == event


def test_no_payload_null_and_empty_bytes_are_three_things() -> None:
    none, null, empty = make(), make(payload=None), make(payload=b"")
    assert [event.packed.size for event in (none, null, empty)] == [0, 4, 0]
    assert len({event.content_digest for event in (none, null, empty)}) == 3
    assert len({none, null, empty}) == 3
    assert stored_again(none).payload is MISSING
    assert stored_again(null).payload is None
    assert stored_again(empty).payload == b""
    assert make(payload=MISSING) == none


def test_bytes_and_json_of_the_same_look_are_two_things() -> None:
    raw = b"abc"
    text = base64.b64encode(raw).decode()
    digests = {
        make(payload=payload).content_digest
        for payload in (raw, text, {"payload_bytes": text}, {"bytes": text}, [text], raw.decode())
    }
    assert len(digests) == 6


def nested(depth: int, leaf: Any, opening: str = "list") -> Any:
    for _ in range(depth):
        leaf = {"k": leaf} if opening == "dict" else [leaf]
    return leaf


@pytest.mark.parametrize("opening", ["list", "dict"])
@pytest.mark.parametrize("leaf", [1, 1.5, Kind.ADDED], ids=["plain", "float", "enum"])
def test_depth(opening: str, leaf: Any) -> None:
    """All three ways through a payload: plain, with doubles, with subclasses."""
    stored_again(make(payload=nested(128, leaf, opening)))
    for depth in (129, 200, 255, 3000):
        refuse("payload", nested(depth, leaf, opening), "must not be nested deeper than 128")


def test_a_payload_that_holds_itself_is_too_deep() -> None:
    loop: list[Any] = []
    loop.append(loop)
    refuse("payload", loop, "must not be nested deeper than 128")
    mapping: dict[str, Any] = {"t": ()}
    mapping["self"] = mapping
    refuse("payload", mapping, "must not be nested deeper than 128")


def test_integers_of_payloads() -> None:
    for wrap in (lambda value: value, lambda value: [value], lambda value: {"a": {"b": value}}):
        for value in (-(2**63), 2**64 - 1):
            assert stored_again(make(payload=wrap(value))).payload == wrap(value)
        for value in (-(2**63) - 1, 2**64, 10**5000):
            refuse("payload", wrap(value), "holds an integer outside -2^63 … 2^64-1")


class Plain(enum.Enum):
    A = "a"


@dataclass
class Record:
    a: int = 1


Pair = namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


class Real(float):
    __slots__ = ()


NO_JSON: list[tuple[Any, str]] = [
    (float("nan"), "holds NaN or Infinity"),
    (float("inf"), "holds NaN or Infinity"),
    (-math.inf, "holds NaN or Infinity"),
    (Real("nan"), "holds NaN or Infinity"),
    ("\ud800", "is not valid UTF-8: it holds a lone surrogate"),
    ("a\udfffb", "is not valid UTF-8: it holds a lone surrogate"),
    ({"\udc80": 1}, "is not valid UTF-8: it holds a lone surrogate"),
    (Text("\ud800"), "is not valid UTF-8: it holds a lone surrogate"),
    ({1: 2}, "holds a key that is no text but int"),
    ({None: 2}, "holds a key that is no text but NoneType"),
    ({True: 2}, "holds a key that is no text but bool"),
    ({b"a": 2}, "holds a key that is no text but bytes"),
    ({("a",): 2}, "holds a key that is no text but tuple"),
    (Plain.A, "holds a value of type Plain, which is not JSON"),
    (Record(), "holds a value of type Record, which is not JSON"),
    (WHEN, "holds a value of type datetime, which is not JSON"),
    (date(2026, 1, 1), "holds a value of type date, which is not JSON"),
    (UUID(int=5), "holds a value of type UUID, which is not JSON"),
    (Decimal(1), "holds a value of type Decimal, which is not JSON"),
    ({1, 2}, "holds a value of type set, which is not JSON"),
    (1j, "holds a value of type complex, which is not JSON"),
    (object(), "holds a value of type object, which is not JSON"),
    (orjson.Fragment(b"{"), "holds a value of type Fragment, which is not JSON"),
    (UserDict(a=1), "holds a value of type UserDict, which is not JSON"),
]


@pytest.mark.parametrize("wrap", ["alone", "list", "dict", "deep"])
@pytest.mark.parametrize(("value", "rule"), NO_JSON, ids=lambda value: type(value).__name__)
def test_what_is_no_json_is_refused_by_name(wrap: str, value: Any, rule: str) -> None:
    match wrap:
        case "list":
            value = [1, value]
        case "dict":
            value = {"a": 1, "b": value}
        case "deep":
            value = {"f": 1.5, "a": [{"b": [None, value]}]}
    refuse("payload", value, rule)


@pytest.mark.parametrize(
    "value", [MISSING, b"x", bytearray(b"x"), memoryview(b"x")], ids=lambda value: type(value).__name__
)
def test_inside_json_there_is_nothing_missing_and_no_bytes(value: Any) -> None:
    hint = "" if value is MISSING else "; only a whole payload may be bytes"
    for payload in ([1, value], {"a": 1, "b": value}, {"f": 1.5, "a": [{"b": (None, value)}]}):
        refuse("payload", payload, f"holds a value of type {type(value).__name__}, which is not JSON{hint}")


def test_subclasses_and_tuples_become_plain() -> None:
    payload = {
        Kind.ADDED: Kind.ADDED,
        "n": Number.TWO,
        "o": OrderedDict(b=1, a=True),
        "p": Pair(1, None),
        "t": (1, (2, [])),
        Text("s"): Text("é"),
        "r": Real(1.5),
    }
    plain = {
        "item_added": "item_added",
        "n": 2,
        "o": {"b": 1, "a": True},
        "p": [1, None],
        "t": [1, [2, []]],
        "s": "é",
        "r": 1.5,
    }
    event = make(payload=payload)
    assert exact(event.payload) == exact(plain)
    assert event == make(payload=plain)
    assert event.packed == make(payload=plain).packed
    stored_again(event)
    for value, same in ((Kind.ADDED, "item_added"), (Number.TWO, 2), ((), []), (Real(2.0), 2.0)):
        assert exact(make(payload=value).payload) == exact(same)


def test_the_encoded_payload_is_fixed_when_the_event_is_made() -> None:
    payload: dict[str, list[float]] = {"a": [1]}
    event = make(payload=payload)
    same = make(payload={"a": [1]})
    payload["a"].append(math.nan)
    assert event.packed == same.packed
    assert event.content_digest == same.content_digest


# --- canonical form and digest --------------------------------------------------------------------


def reference_number(number: float) -> str:
    """ECMAScript's Number::toString, step by step from its text: n, k and s as they are called there."""
    if number == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    s = "".join(map(str, digits))
    k = len(s)
    n = exponent + k
    if k <= n <= 21:
        text = s + "0" * (n - k)
    elif 0 < n <= 21:
        text = s[:n] + "." + s[n:]
    elif -6 < n <= 0:
        text = "0." + "0" * -n + s
    else:
        power = f"e{'+' if n - 1 > 0 else '-'}{abs(n - 1)}"
        text = s + power if k == 1 else s[0] + "." + s[1:] + power
    return "-" * sign + text


def reference_json(value: Any) -> str:
    """The canonical form of a JSON value, written plainly, as another language would."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int():
            return str(value)
        case float():
            return reference_number(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{','.join(map(reference_json, value))}]"
    items = sorted(value.items(), key=lambda item: str(item[0]).encode())
    return f"{{{','.join(f'{reference_json(key)}:{reference_json(item)}' for key, item in items)}}}"


def milliseconds(text: str) -> int:
    return math.floor(Decimal(str(datetime.fromisoformat(text).timestamp())) * 1000)


def reference_form(event: Mapping[str, Any], payload_bytes: bytes | None = None) -> str:
    """The canonical form of an event that is given as JSON."""
    if event.get("content_key") is not None:
        return reference_json({"content_key": event["content_key"]})
    facts: dict[str, Any] = {"policy_version": 0, "weight": 1}
    for name in ("kind", "source", "source_version", "policy_version", "weight", "ref"):
        if event.get(name) is not None:
            facts[name] = event[name]
    for name in INSTANTS:
        if event.get(name) is not None:
            facts[name] = milliseconds(event[name])
    if "payload" in event:
        facts["payload"] = event["payload"]
    if payload_bytes is not None:
        facts["payload_bytes"] = base64.b64encode(payload_bytes).decode()
    return reference_json(facts)


def reference_digest(form: str) -> str:
    raw = blake2b(form.encode(), digest_size=16).digest()
    return "1" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def golden() -> Iterator[Any]:
    for vector in json.loads(GOLDEN.read_text())["vectors"]:
        yield pytest.param(vector, id=vector["name"])


@pytest.mark.parametrize("vector", list(golden()))
def test_golden_vectors(vector: dict[str, Any]) -> None:
    raw = base64.b64decode(vector["payload_base64"]) if "payload_base64" in vector else None
    event = Event.of(vector["event"] if raw is None else {**vector["event"], "payload": raw})
    assert event.canonical.decode() == vector["canonical"]
    assert event.content_digest == vector["digest"]
    assert stored_again(event).canonical.decode() == vector["canonical"]
    assert reference_form(vector["event"], raw) == vector["canonical"]
    assert reference_digest(vector["canonical"]) == vector["digest"]


def test_golden_vectors_are_many_and_differ_where_they_should() -> None:
    vectors = json.loads(GOLDEN.read_text())["vectors"]
    assert len(vectors) >= 40
    assert len({vector["name"] for vector in vectors}) == len(vectors)
    by_canonical: dict[str, set[str]] = {}
    for vector in vectors:
        by_canonical.setdefault(vector["canonical"], set()).add(vector["digest"])
        assert re.fullmatch(r"1[A-Za-z0-9_-]{22}", vector["digest"])
    assert all(len(digests) == 1 for digests in by_canonical.values())
    assert len(set.union(*by_canonical.values())) == len(by_canonical)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (0.0, "0"),
        (-1.0, "-1"),
        (1e21, "1e+21"),
        (1e20, "100000000000000000000"),
        (-1e21, "-1e+21"),
        (123456789012345680000.0, "123456789012345680000"),
        (2.0**53, "9007199254740992"),
        (2.0**63, "9223372036854776000"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (1.5e-7, "1.5e-7"),
        (-1.234e-5, "-0.00001234"),
        (5e-324, "5e-324"),
        (2.2250738585072014e-308, "2.2250738585072014e-308"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (333333333.3333333, "333333333.3333333"),
        (0.1, "0.1"),
        (1e16, "10000000000000000"),
        (1.2345678901234568e16, "12345678901234568"),
        (1e23, "1e+23"),
        (9.999999999999997e22, "9.999999999999997e+22"),
    ],
)
def test_doubles_as_rfc_8785_writes_them(number: float, text: str) -> None:
    assert number_text(number) == text
    assert reference_number(number) == text
    assert canonical_json([number]) == f"[{text}]".encode()


@settings(max_examples=400)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(struct.unpack(">d", bytes.fromhex("7fefffffffffffff"))[0])
def test_any_double(number: float) -> None:
    text = canonical_json(number).decode()
    assert text == reference_number(number)
    assert float(text) == number


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(10**17), 10**17).map(float)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(json_values)
def test_any_json_value(value: Any) -> None:
    assert canonical_json(value).decode() == reference_json(value)
    event = make(payload=value)
    assert exact(event.payload) == exact(value)
    assert exact(stored_again(event).payload) == exact(value)
    assert event.packed.size == len(orjson.dumps(value))
    # Reading the canonical form back gives the same canonical form. A double of 2^64 or more is written like an integer
    # that no payload may hold.
    again = json.loads(
        event.canonical, parse_int=lambda text: int(text) if -(2**63) <= int(text) < 2**64 else float(text)
    )
    assert canonical_json(again["payload"]).decode() == reference_json(value)


def test_canonical_json_takes_what_a_payload_may_be() -> None:
    assert canonical_json({"b": (1, 2.0), "a": Kind.ADDED}) == b'{"a":"item_added","b":[1,2]}'
    with pytest.raises(InvalidEvent, match="payload: holds a value of type bytes"):
        canonical_json(b"x")
    with pytest.raises(InvalidEvent, match="payload: holds a value of type Missing"):
        canonical_json(MISSING)


def test_what_the_digest_covers() -> None:
    """B032: other content under the same id is told apart, by each field of the canonical form alone."""
    plain = make(payload={"q": 1})
    changed = {
        "kind": "other",
        "occurred_at": WHEN + timedelta(milliseconds=1),
        "source": "other",
        "source_version": 0,
        "policy_version": 1,
        "deadline_at": WHEN,
        "weight": 0,
        "ref": "",
        "payload": {"q": 2},
        "content_key": "",
    }
    digests = {make(**{"payload": {"q": 1}, name: value}).content_digest for name, value in changed.items()}
    assert len(digests | {plain.content_digest}) == len(changed) + 1
    ignored = {"event_id": "e2", "bucket_key": "x:y:z", "trace": TRACE, "received_at": WHEN}
    for name, value in ignored.items():
        assert make(**{"payload": {"q": 1}, name: value}).content_digest == plain.content_digest


def test_a_content_key_alone_says_what_is_the_same() -> None:
    key = "order 7, version 17"
    event = make(content_key=key, payload={"attempt": 1})
    other = make(content_key=key, payload={"attempt": 2}, kind="x", weight=9, occurred_at=WHEN + timedelta(1))
    assert event.content_digest == other.content_digest
    assert event != other
    assert event.canonical == b'{"content_key":"order 7, version 17"}'
    assert make(content_key="other", payload={"attempt": 1}).content_digest != event.content_digest


def test_key_order_and_number_form_do_not_change_the_digest() -> None:
    left = make(payload={"a": 1, "b": {"c": -0.0, "d": [1e2]}})
    right = make(payload={"b": {"d": [100], "c": 0}, "a": 1.0})
    assert left.content_digest == right.content_digest
    assert left.packed.envelope != right.packed.envelope
    assert make(payload=[1]).content_digest != make(payload=[True]).content_digest
    assert make(payload=2**53 + 1).content_digest != make(payload=float(2**53)).content_digest


# --- packed, stored, read back --------------------------------------------------------------------


def test_packed_in_full() -> None:
    packed = Event.of({**FULL, "kind": "é x", "source": "sh op"}).packed
    head = (
        '{"size":27,"weight":5,"kind":"é x","occurred_at":1792159200250,"source":"sh op","source_version":17,'
        '"policy_version":3,"deadline_at":1792162800250,"ref":"s3://records/7","content_key":"order-7-v17",'
        f'"trace":"{TRACE}"'
    ).encode()
    digest = reference_digest('{"content_key":"order-7-v17"}')
    assert packed.event_id == b"e1"
    assert packed.size == 27
    assert packed.envelope == head + ',"payload":{"b":[1,2.5,null],"a":"é"}}'.encode()
    assert packed.mark == f"1792159200250 17 {digest}".encode()
    assert packed.facts == f"1792159200250 17 3 1792162800250 5 27 {len(head)} 4 é xsh op".encode()


def test_packed_at_its_least() -> None:
    event = make()
    envelope = b'{"size":0,"weight":1,"kind":"item_added","occurred_at":1792159200250,"source":"shop"}'
    assert event.packed == (
        b"e1",
        f"1792159200250 - {event.content_digest}".encode(),
        f"1792159200250 - 0 - 1 0 {len(envelope) - 1} 10 item_addedshop".encode(),
        envelope,
        0,
    )
    assert event.packed is event.packed


def test_packed_bytes() -> None:
    packed = make(payload=b"\0\xff\xfe").packed
    assert packed.size == 3
    assert packed.envelope.startswith(b'{"size":3,')
    assert packed.envelope.endswith(b',"payload_bytes":"AP/+"}')


@pytest.mark.parametrize("payload", [MISSING, None, [1.0], b"raw", '","payload":'], ids=repr)
def test_cut_gives_the_head(payload: Any) -> None:
    event = Event.of({**FULL, "kind": '"payload":', "payload": payload})
    cut = int(event.packed.facts.split(b" ")[6])
    head = event.packed.envelope[:cut] + b"}"
    fields = unpack("e1", head, event.bucket_key)
    assert "payload" not in fields
    assert fields["size"] == event.packed.size
    assert dict(Event.from_stored("e1", event.bucket_key, head)[0]) == {**dict(event), "payload": MISSING}


@pytest.mark.parametrize("payload", [MISSING, None, {"late": False}, b"raw"], ids=repr)
def test_flags_that_the_server_appends(payload: Any) -> None:
    event = make(payload=payload)
    for late in (False, True):
        for revised in (False, True):
            flags = b',"late":true' * late + b',"revised":true' * revised
            stored = event.packed.envelope[:-1] + flags + b"}"
            back, was_late, was_revised = Event.from_stored(b"e1", event.bucket_key, stored)
            assert (was_late, was_revised) == (late, revised)
            assert back == event
            assert dict(back) == dict(event)
            fields = unpack(b"e1", stored, event.bucket_key)
            assert (fields.get("late", False), fields.get("revised", False)) == (late, revised)


def test_an_event_whose_payload_was_not_kept_still_knows_its_digest() -> None:
    event = make(payload={"q": 1})
    cut = int(event.packed.facts.split(b" ")[6])
    stored = event.packed.envelope[:cut] + b',"digest":"' + event.content_digest.encode() + b'"}'
    back, _, _ = Event.from_stored("e1", event.bucket_key, stored)
    assert back.payload is MISSING
    assert back.content_digest == event.content_digest
    assert back not in (event, make())


def test_unpack_in_full() -> None:
    event = Event.of(FULL)
    assert unpack(b"\xc3\xa9", event.packed.envelope, "acme:order:7") == {
        "event_id": "é",
        "bucket_key": "acme:order:7",
        "size": 27,
        "weight": 5,
        "kind": "item_added",
        "occurred_at": WHEN_MS,
        "source": "shop",
        "source_version": 17,
        "policy_version": 3,
        "deadline_at": WHEN_MS + 3_600_000,
        "ref": "s3://records/7",
        "content_key": "order-7-v17",
        "trace": TRACE,
        "payload": FULL["payload"],
    }


@pytest.mark.parametrize("stored", [b"", b"{", b"[]", b"5", b"null", b'{"payload_bytes":5}', b"\xff"])
def test_an_envelope_that_no_release_wrote(stored: bytes) -> None:
    with pytest.raises(InternalError, match="a stored envelope can't be read"):
        unpack(b"e1", stored, "a:b:c")


bounded = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {
            "event_id": bounded,
            "bucket_key": st.builds(bucket_key, bounded, bounded, bounded),
            "kind": bounded,
            "source": bounded,
            "occurred_at": st.datetimes(
                datetime(2000, 1, 2), datetime(2099, 12, 30), timezones=st.timezones(), allow_imaginary=False
            ),
        },
        optional={
            "source_version": st.integers(0, 2**63 - 1),
            "policy_version": st.integers(0, 2**31 - 1),
            "deadline_at": st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)).map(
                datetime.isoformat
            ),
            "weight": st.integers(0, 2**31 - 1),
            "payload": json_values | st.binary(max_size=40),
            "ref": bounded | st.just(""),
            "content_key": bounded | st.just(""),
            "trace": st.just(TRACE),
        },
    )
)
def test_any_event_survives_storing(mapping: dict[str, Any]) -> None:
    event = Event.of(mapping)
    back = stored_again(event)
    for name in Event.model_fields:
        assert exact(getattr(back, name)) == exact(getattr(event, name))
    for name in mapping.keys() - {"occurred_at", "deadline_at"}:
        assert exact(getattr(event, name)) == exact(mapping[name])
    assert abs(event.occurred_at - mapping["occurred_at"]) < timedelta(milliseconds=1)
    packed = event.packed
    *tokens, names = packed.facts.split(b" ", 8)
    kind_bytes = int(tokens[7])
    assert names[:kind_bytes].decode() == event.kind
    assert names[kind_bytes:].decode() == event.source
    assert tokens[:2] == packed.mark.split(b" ")[:2]
    assert [int(token) for token in tokens[4:6]] == [event.weight, packed.size]
    assert orjson.loads(packed.envelope)["size"] == packed.size
    assert parse_json_line(packed.envelope) == orjson.loads(packed.envelope)


# --- as a pydantic model --------------------------------------------------------------------------


def test_events_are_values() -> None:
    event, same = Event.of(FULL), Event.of(FULL)
    assert event == same
    assert hash(event) == hash(same)
    assert event != make()
    assert event != "e1"
    assert len({event, same, make()}) == 2
    for changed in ({"trace": None}, {"event_id": "e2"}, {"bucket_key": "a:b:c"}, {"content_key": "x"}):
        assert Event.of({**FULL, **changed}) != event
    assert make(payload=[True]) != make(payload=[1])
    assert make(payload=[1.0]) == make(payload=[1])
    assert hash(make(payload=[1.0])) == hash(make(payload=[1]))


@pytest.mark.parametrize("field", list(Event.model_fields))
def test_events_are_frozen(field: str) -> None:
    event = Event.of(FULL)
    with pytest.raises(ValidationError):
        setattr(event, field, "x")
    with pytest.raises(ValidationError):
        delattr(event, field)


def test_copies_and_pickles() -> None:
    for event in (Event.of(FULL), make(), make(payload=b"\xff"), stored_again(make(payload=[1.5]))):
        for twin in (
            copy.copy(event),
            copy.deepcopy(event),
            pickle.loads(pickle.dumps(event)),
            event.model_copy(),
        ):
            assert twin == event
            assert twin.packed == event.packed
            assert (twin.payload is MISSING) == (event.payload is MISSING)


def test_model_copy_checks_and_forgets_what_was_computed() -> None:
    event = Event.of(FULL)
    assert event.packed
    changed = event.model_copy(update={"kind": "other", "content_key": None})
    assert changed == Event.of({**FULL, "kind": "other", "content_key": None})
    assert changed.packed != event.packed
    with pytest.raises(InvalidEvent, match="kind: must not be empty"):
        event.model_copy(update={"kind": ""})


def test_no_payload_key_or_reference_in_a_repr() -> None:
    event = Event.of({**FULL, "payload": {"secret": "s3cr3t"}})
    assert repr(event) == str(event)
    assert repr(event) == (
        "Event(event_id='e1', kind='item_added', source='shop', occurred_at='2026-10-16T14:00:00.250000+00:00')"
    )


def test_refusals_show_no_content() -> None:
    for field, value in (
        ("payload", {"secret": {"s3cr3t"}}),
        ("bucket_key", "s3cr3t:b"),
        ("event_id", "s3cr3t" * 100),
        ("ref", "s3cr3t" * 100),
        ("occurred_at", "s3cr3t"),
        ("trace", "s3cr3t"),
        ("weight", "s3cr3t"),
    ):
        with pytest.raises(InvalidEvent) as caught:
            make(**{field: value})
        assert "s3cr3t" not in str(caught.value) + repr(caught.value)


def test_inside_another_model() -> None:
    class Batch(BaseModel):
        events: list[Event]

    event = Event.of(FULL)
    batch = Batch.model_validate({"events": [FULL, event]})
    assert batch.events == [event, event]
    assert batch.events[1] is event
    assert Event.model_validate(FULL) == event
    with pytest.raises(ValidationError, match="kind: must not be empty") as caught:
        Batch.model_validate({"events": [{**FULL, "kind": "", "payload": "s3cr3t"}]})
    assert "s3cr3t" not in str(caught.value)


def test_dumps_can_be_taken_again() -> None:
    for event in (Event.of(FULL), make(), make(payload=None), make(payload=b"\xff")):
        assert Event.of(event.model_dump()) == event
    assert "payload" not in make().model_dump()
    text = Event.of(FULL).model_dump_json()
    assert Event.of(parse_json_line(text.encode())) == Event.of(FULL)
    assert make(payload=b"\xff").model_dump(mode="json")["payload"] == "_w=="


def test_the_schema_says_the_bounds() -> None:
    schema = Event.model_json_schema()
    assert schema["required"] == list(BASE)
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["event_id"]["maxLength"] == 256
    assert properties["weight"] == {
        "default": 1,
        "maximum": 2**31 - 1,
        "minimum": 0,
        "title": "Weight",
        "type": "integer",
    }
    for field, high in {**BOUNDS, "bucket_key": 512}.items():
        options = properties[field].get("anyOf", [properties[field]])
        assert options[0]["maxLength"] == high


# --- lines of files -------------------------------------------------------------------------------


def test_a_line_becomes_an_event() -> None:
    line = (
        b'{"event_id":"e1","bucket_key":"acme:order:7","kind":"item_added","source":"shop",'
        b'"occurred_at":"2026-10-16T14:00:00.250Z","payload":{"b":[1,2.5,null],"a":"\xc3\xa9"},"ref":null}\n'
    )
    assert Event.of(parse_json_line(line)) == make(payload=FULL["payload"])
    assert parse_json_line(b"\xef\xbb\xbf" + line) == parse_json_line(line)


@pytest.mark.parametrize(
    "number",
    [
        0,
        2**53 + 1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        10**28,
        12345678901234567890,
        -99999999999999999999,
    ],
)
def test_integers_of_lines_are_exact(number: int) -> None:
    parsed = parse_json_line(b'{"n":%d,"text":"1.5e3"}' % number)
    assert exact(parsed) == exact({"n": number, "text": "1.5e3"})
    inside = -(2**63) <= number < 2**64
    if inside:
        assert make(payload=parsed).payload == parsed
    else:
        refuse("payload", parsed, "holds an integer outside -2^63 … 2^64-1")


def test_numbers_of_lines_of_any_length() -> None:
    for digits in (b"9" * 30, b"-" + b"9" * 30, b"1" * 5000):
        refuse("payload", parse_json_line(b'{"n":%b}' % digits), "holds an integer outside")
        refuse("weight", parse_json_line(b'{"n":%b}' % digits)["n"], "must ")
    parsed = parse_json_line(b'{"a":0.1234567890123456789012345,"b":12345678901234567890.5,"c":-0,"d":-0.0}')
    assert exact(parsed) == exact({"a": 0.12345678901234568, "b": 1.2345678901234567e19, "c": 0, "d": -0.0})


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"", "is not JSON"),
        (b"   ", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a":1,}', "is not JSON"),
        (b"{'a':1}", "is not JSON"),
        (b'{"a":1} {"b":2}', "is not JSON"),
        (b'{"a":1}x', "is not JSON"),
        (b'{"a":01}', "is not JSON"),
        (b'{"a":+1}', "is not JSON"),
        (b'{"a":.5}', "is not JSON"),
        (b'{"a":"\n"}', "is not JSON"),
        (b'{"a":"\\x"}', "is not JSON"),
        (b'{"a":"s3cr3t', "is not JSON"),
        (b'{"a":NaN}', "is not JSON: NaN is no JSON number"),
        (b'{"a":[Infinity]}', "is not JSON: Infinity is no JSON number"),
        (b'{"a":-Infinity}', "is not JSON: -Infinity is no JSON number"),
        (b'{"a":"\xff"}', "is not valid UTF-8 at byte 6"),
        (b'{"a":"\xed\xa0\x80"}', "is not valid UTF-8 at byte 6"),
        ('{"a":1}'.encode("utf-16"), "is not valid UTF-8 at byte 0"),
        (b"\0", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b"12345678901234567890123", "is not a JSON object"),
    ],
)
def test_lines_that_are_no_json_object(line: bytes, rule: str) -> None:
    with pytest.raises(InvalidEvent, match=rule) as caught:
        parse_json_line(line)
    assert caught.value.field == "line"
    assert "s3cr3t" not in str(caught.value)


def test_infinity_in_disguise() -> None:
    refuse("payload", parse_json_line(b'{"a":1e400}'), "holds NaN or Infinity")


def test_lone_surrogates_of_lines_are_refused_by_field() -> None:
    refuse("kind", parse_json_line(b'{"kind":"\\ud800"}')["kind"], "is not valid UTF-8")
    refuse("payload", parse_json_line(b'{"a":"\\udfff x"}'), "is not valid UTF-8")
    assert parse_json_line(b'{"kind":"\\ud83d\\ude42"}') == {"kind": "🙂"}


@pytest.mark.parametrize("depth", [128, 129, 130, 1000, 1100, 5000, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"k":'])
@pytest.mark.parametrize("tail", [b"", b',"n":18446744073709551616'], ids=["", "slow"])
def test_deep_lines(depth: int, opening: bytes, tail: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    core = b"1" if opening != b"[" else b""
    line = b'{"a":"[[[{{\\"","payload":' + opening * depth + core + closing * depth + b"}"
    if tail:
        line = line[:-1] + tail + b"}"
    if depth == 128:
        stored_again(make(payload=parse_json_line(line)["payload"]))
        return
    with pytest.raises(InvalidEvent, match="must not be nested deeper than 128") as caught:
        Event.of({**BASE, "payload": parse_json_line(line)["payload"]})
    assert caught.value.field == "payload"


def test_deep_text_that_is_no_object_or_never_ends() -> None:
    for line in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 2000 + b"]" * 2000, b'{"a":"' + b"[" * 5000):
        with pytest.raises(InvalidEvent) as caught:
            parse_json_line(line)
        assert caught.value.field == "line"


def test_deep_text_that_is_no_json_repeats_no_value() -> None:
    for start in (b'{"payload":"s3cr3t"', b'{"a\nb":', b'{"a\\x":', b'{"a":1,"s3cr3t":'):
        with pytest.raises(InvalidEvent, match="must not be nested deeper than 128") as caught:
            parse_json_line(start + b"[" * 2000)
        assert str(caught.value) == "line: must not be nested deeper than 128"


def test_of_a_key_given_twice_the_last_one_counts() -> None:
    assert parse_json_line(b'{"a":1,"a":2}') == {"a": 2}
    assert parse_json_line(b'{"a":18446744073709551616,"a":2}') == {"a": 2}


@settings(max_examples=200)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), json_values, max_size=4))
def test_any_json_object_is_read_exactly(value: dict[str, Any]) -> None:
    for line in (orjson.dumps(value), json.dumps(value).encode()):
        assert exact(parse_json_line(line)) == exact(value)


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text('{}[]":,0123456789.eE-\\u tnNaIf', max_size=40).map(str.encode))
def test_any_line_is_read_or_refused(line: bytes) -> None:
    try:
        assert isinstance(parse_json_line(line), dict)
    except InvalidEvent as error:
        assert error.field  # noqa: PT017


# --- errors ---------------------------------------------------------------------------------------


def error_classes(root: type[AccumulatorError] = AccumulatorError) -> Iterator[type[AccumulatorError]]:
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def test_every_error_is_drawn_in_the_docstring() -> None:
    drawn = re.findall(r"^ +(?:[│├└ ]*)([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    assert drawn == [cls.__name__ for cls in error_classes() if cls.__module__ == errors.__name__]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.InvalidInput("duration", "must have a unit"), "duration: must have a unit"),
        (errors.InvalidEvent("kind", "is required"), "kind: is required"),
        (errors.InvalidEvent("kind", "is required", 0), "event 0: kind: is required"),
        (errors.InvalidScenario("push", "is unknown", 4), "step 5: push: is unknown"),
        (errors.InvalidSettings("namespace", "is wrong"), "namespace: is wrong"),
        (errors.InvalidPolicy("order", "max_age", "is wrong"), "policy order: max_age: is wrong"),
        (errors.InvalidPolicy("", "max_age", "is wrong"), "max_age: is wrong"),
        (errors.UnknownFlow("order"), "flow order: there is no policy for it and none named 'default'"),
        (errors.HandlerMissing("order"), "flow order: no handler is registered for it"),
        (errors.HandlerMissing("order", "ladder"), "ladder order: no handler is registered for it"),
        (errors.HandlerMissing("order", what="endpoint is configured"), "flow order: no endpoint is configured for it"),
        (errors.ServerRefused("OOM", "command not allowed"), "OOM: command not allowed"),
        (errors.NamespaceMismatch("other partitions"), "other partitions"),
        (errors.AuthenticationFailed("wrong password"), "wrong password"),
        (errors.MissingRight("EVALSHA"), "EVALSHA"),
        (errors.InternalError("reply"), "reply"),
    ],
)
def test_errors_say_their_text_also_after_pickling(error: AccumulatorError, text: str) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert str(error).startswith(text)
    assert vars(twin) == vars(error)
    assert isinstance(error, InvalidInput) == isinstance(error, ValueError)
