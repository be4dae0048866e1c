"""Policies: what is read, what is refused and why, what the scripts get, and when the cut-offs fall."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulator.errors import InvalidInput, InvalidPolicy
from accumulator.policy import MAX_DURATION_MS, OPTIONS, Policy, format_duration, parse_duration

DAY_MS = 86_400_000
MIB = 1024 * 1024

DEFAULTS: dict[str, tuple[str, object]] = {
    # option: (as written in SPEC section 3, as read back)
    "max_age": ("1h", 3_600_000),
    "max_events": ("1000", 1000),
    "max_bytes": ("1 MiB", 1_048_576),
    "max_weight": ("none", None),
    "max_event_bytes": ("64 KiB", 65_536),
    "terminal_kinds": ("none", ()),
    "starter_kinds": ("none", ()),
    "terminal_grace": ("0", 0),
    "cutoffs": ("none", ()),
    "timezone": ("UTC", "UTC"),
    "deadline_margin": ("0", 0),
    "dedupe_ttl": ("24h", 86_400_000),
    "on_conflict": ("reject", "reject"),
    "order_by": ("none", None),
    "on_late": ("accept", "accept"),
    "max_delay": ("none", None),
    "on_too_old": ("as `on_late`", "accept"),
    "max_future": ("5m with `order_by: occurred_at`, else none", None),
    "kinds": ("any", None),
    "on_policy_change": ("split", "split"),
    "keep": ("all", "all"),
    "ordered": ("true", True),
    "payload_ttl": ("3d", 259_200_000),
    "metadata_ttl": ("14d", 1_209_600_000),
    "handover": ("each", "each"),
    "requery_kinds": ("none", ()),
    "busy_streak_alert": ("10", 10),
    "sink": ("rq", "rq"),
}

EVERYTHING: dict[str, Any] = {
    "inactivity": "90s",
    "max_age": "48h",
    "max_events": 50,
    "max_bytes": 1000,
    "max_weight": 9_007_199_254_740_991,
    "max_event_bytes": 2000,
    "terminal_kinds": ["pago", "cancelado"],
    "starter_kinds": ["novo", "pago"],
    "terminal_grace": "5s",
    "cutoffs": ["17:30", "12:00"],
    "timezone": "America/Sao_Paulo",
    "deadline_margin": "250ms",
    "dedupe_ttl": "3d",
    "on_conflict": "accept_newer",
    "order_by": "occurred_at",
    "on_late": "reconcile",
    "max_delay": "60s",
    "on_too_old": "reject",
    "max_future": "0s",
    "kinds": ["novo", "pago", "cancelado", "ação 🚚"],
    "on_policy_change": "keep",
    "keep": "last",
    "ordered": False,
    "payload_ttl": "1d",
    "metadata_ttl": "1d",
    "handover": "together",
    "requery_kinds": ["pago"],
    "busy_streak_alert": 3,
    "sink": "direct",
}


def policy(**options: Any) -> Policy:
    return Policy(**({"inactivity": "10s"} | options))


def refused(options: object, flow: str = "pedido") -> InvalidPolicy:
    with pytest.raises(InvalidPolicy) as caught:
        Policy.load(flow, options)
    return caught.value


# Durations


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250ms", 250),
        ("10s", 10_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("3d", 259_200_000),
        ("0s", 0),
        ("0ms", 0),
        ("007s", 7000),
        ("3650d", MAX_DURATION_MS),
        ("315360000000ms", MAX_DURATION_MS),
    ],
)
def test_a_duration_is_a_whole_number_and_a_unit(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (10, "10 is a bare number: write it with its unit, as in 10s"),
        (0, "0 is a bare number: write it with its unit, as in 10s"),
        (1.5, "1.5 is a bare number: write it with its unit, as in 10s"),
        (float("nan"), "nan is a bare number: write it with its unit, as in 10s"),
        (10**5000, "a very large number is a bare number: write it with its unit, as in 10s"),
        (True, "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not true"),
        (None, "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not null"),
        (["10s"], "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not a list"),
        (
            timedelta(seconds=1),
            "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not a timedelta",
        ),
        ("-5s", "must not be negative, and is '-5s'"),
        ("3651d", "must be at most 3650d, not '3651d'"),
        ("315360000001ms", "must be at most 3650d, not '315360000001ms'"),
        ("999999999999999999d", "must be at most 3650d, not '999999999999999999d'"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_duration_is_refused_with_the_reason(value: object, rule: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_duration(value)
    assert (caught.value.field, caught.value.rule) == ("duration", rule)


@pytest.mark.parametrize(
    "text",
    [
        *("", "10", "s", "10 s", " 10s", "10s ", "10s\n", "+10s", "1.5s", "1e3s", "10S"),
        *("10sec", "10us", "1w", "1h30m", "１０s", "٣s", "9" * 19 + "ms"),
    ],
)
def test_nothing_but_a_number_and_a_unit_is_a_duration(text: str) -> None:
    with pytest.raises(InvalidInput, match="must be a whole number and a unit"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (1500, "1500ms"),
        (60_000, "1m"),
        (90_000, "90s"),
        (86_400_000, "1d"),
        (90_000_000, "25h"),
    ],
)
def test_a_duration_is_written_in_its_largest_whole_unit(ms: int, text: str) -> None:
    assert format_duration(ms) == text


@given(st.integers(0, MAX_DURATION_MS))
def test_every_duration_comes_back_as_written(ms: int) -> None:
    assert parse_duration(format_duration(ms)) == ms


# Defaults and accepted values


def test_the_options_and_their_defaults_are_those_of_the_contract() -> None:
    assert {name: default for name, (default, _) in OPTIONS.items()} == {
        "inactivity": "required",
        **{name: text for name, (text, _) in DEFAULTS.items()},
    }
    assert policy().model_dump() == {"inactivity": 10_000} | {name: value for name, (_, value) in DEFAULTS.items()}
    assert list(OPTIONS) == list(Policy.model_fields)
    assert all(meaning for _, meaning in OPTIONS.values())


@pytest.mark.parametrize(
    ("options", "option", "value"),
    [
        ({"inactivity": None}, "inactivity", None),
        ({"inactivity": "1h"}, "inactivity", 3_600_000),  # equal to max_age
        ({"inactivity": "3650d", "max_age": "3650d"}, "max_age", MAX_DURATION_MS),
        ({"inactivity": "1ms", "max_age": "1ms"}, "max_age", 1),
        ({"max_events": 1}, "max_events", 1),
        ({"max_events": 100_000}, "max_events", 100_000),
        ({"max_bytes": 1}, "max_bytes", 1),
        ({"max_bytes": 256 * MIB}, "max_bytes", 256 * MIB),
        ({"max_event_bytes": 8 * MIB}, "max_event_bytes", 8 * MIB),  # may exceed max_bytes
        ({"max_weight": 1}, "max_weight", 1),
        ({"max_weight": None}, "max_weight", None),
        ({"terminal_grace": "0s"}, "terminal_grace", 0),
        ({"terminal_grace": 0}, "terminal_grace", 0),
        (
            {"terminal_grace": "2h"},
            "terminal_grace",
            7_200_000,
        ),  # above max_age, without terminal_kinds: harmless
        ({"deadline_margin": "0ms"}, "deadline_margin", 0),
        ({"deadline_margin": 0}, "deadline_margin", 0),
        ({"max_future": "0s"}, "max_future", 0),
        ({"max_future": 0}, "max_future", 0),
        ({"max_delay": None}, "max_delay", None),
        ({"on_too_old": "reject"}, "on_too_old", "reject"),  # without max_delay
        ({"kinds": None}, "kinds", None),
        ({"terminal_kinds": None}, "terminal_kinds", ()),
        ({"starter_kinds": []}, "starter_kinds", ()),
        ({"cutoffs": None}, "cutoffs", ()),
        ({"cutoffs": ["23:59", "00:00"]}, "cutoffs", ("00:00", "23:59")),
        ({"timezone": "Asia/Kathmandu"}, "timezone", "Asia/Kathmandu"),  # without cutoffs
        ({"timezone": "Etc/GMT+3"}, "timezone", "Etc/GMT+3"),
        ({"terminal_kinds": ["b", "a"], "starter_kinds": ["a"]}, "terminal_kinds", ("a", "b")),
        ({"kinds": ["x" * 128]}, "kinds", ("x" * 128,)),
        ({"requery_kinds": ["\x00\n: %"]}, "requery_kinds", ("\x00\n: %",)),
        ({"sink": "none"}, "sink", "none"),
        ({"order_by": None}, "order_by", None),
    ],
)
def test_what_is_allowed_is_taken_as_it_is(options: dict[str, Any], option: str, value: object) -> None:
    assert getattr(policy(**options), option) == value


def test_on_too_old_follows_on_late_unless_it_is_given() -> None:
    assert policy(on_late="reconcile").on_too_old == "reconcile"
    assert policy(on_late="reconcile", on_too_old="accept").on_too_old == "accept"


def test_max_future_defaults_to_five_minutes_where_the_instant_gives_the_order() -> None:
    assert policy(order_by="occurred_at").max_future == 300_000
    assert policy(order_by="occurred_at", max_future=None).max_future is None
    assert policy(order_by="occurred_at", max_future="1s").max_future == 1000
    assert policy(order_by="source_version").max_future is None


def test_the_longest_lists_are_taken() -> None:
    kinds = [f"k{n}" for n in range(1000)]
    cutoffs = [f"{n // 2:02}:{n % 2 * 30:02}" for n in range(48)]
    taken = policy(kinds=kinds, terminal_kinds=kinds, cutoffs=cutoffs)
    assert (len(taken.terminal_kinds), len(taken.cutoffs)) == (1000, 48)


def test_a_policy_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        policy().max_events = 5  # type: ignore[misc]


# Refusals, one by one: option and reason

TIME = "must be a whole number and a unit (ms, s, m, h, d), as in 10s, not "
POSITIVE = (
    "inactivity",
    "max_age",
    "dedupe_ttl",
    "max_delay",
    "payload_ttl",
    "metadata_ttl",
)
ZERO_IS_FINE = ("terminal_grace", "deadline_margin", "max_future")
CAPS = {
    "max_events": 100_000,
    "max_bytes": 256 * MIB,
    "max_weight": 2**53 - 1,
    "max_event_bytes": 8 * MIB,
    "busy_streak_alert": 2**31 - 1,
}
KIND_LISTS = ("terminal_kinds", "starter_kinds", "kinds", "requery_kinds")
CHOICES = {
    "on_conflict": "'reject', 'keep_first', 'accept_newer' or 'reconcile'",
    "order_by": "'source_version' or 'occurred_at'",
    "on_late": "'accept', 'reconcile' or 'reject'",
    "on_too_old": "'accept', 'reconcile' or 'reject'",
    "on_policy_change": "'split', 'keep' or 'reconcile'",
    "keep": "'all' or 'last'",
    "handover": "'each' or 'together'",
    "sink": "'rq', 'direct', 'webhook' or 'none'",
}

NO_CHOICE: tuple[object, ...] = ("sometimes", "", True, 1, ["reject"], {})

REFUSED: list[tuple[dict[Any, Any], str, str]] = [
    ({"inactivity": "2h"}, "inactivity", "must not be above max_age: 2h against 1h"),
    ({"inactivity": "11s", "max_age": "10s"}, "inactivity", "must not be above max_age: 11s against 10s"),
    ({"inactivity": "3600001ms"}, "inactivity", "must not be above max_age: 3600001ms against 1h"),
    ({"payload_ttl": "15d"}, "payload_ttl", "must not be above metadata_ttl: 15d against 14d"),
    ({"metadata_ttl": "1d"}, "payload_ttl", "must not be above metadata_ttl: 3d against 1d"),
    ({"max_age": None}, "max_age", f"{TIME}null"),  # can't be switched off
    ({"inactvity": "10s"}, "inactvity", "is unknown; did you mean inactivity?"),
    ({"colour": "red"}, "colour", "is unknown"),
    ({"x" * 5000: 1}, "x" * 40 + "…", "is unknown"),
    ({"self": 1}, "self", "is unknown"),
    ({1: "a"}, "1", "is unknown"),
    ({"ordered": 1}, "ordered", "must be true or false"),
    ({"ordered": "yes"}, "ordered", "must be true or false"),
    ({"ordered": None}, "ordered", "must be true or false"),
    (
        {"kinds": []},
        "kinds",
        "must list at least one kind: with none, no event would be accepted (null: any kind)",
    ),
    (
        {"kinds": ["a"], "terminal_kinds": ["a", "b"]},
        "terminal_kinds",
        "lists 'b', which kinds does not let in",
    ),
    ({"kinds": ["a"], "starter_kinds": ["b"]}, "starter_kinds", "lists 'b', which kinds does not let in"),
    ({"kinds": ["a"], "requery_kinds": ["b"]}, "requery_kinds", "lists 'b', which kinds does not let in"),
    ({"cutoffs": "12:00"}, "cutoffs", "must be a list of local times of day, not '12:00'"),
    ({"cutoffs": 720}, "cutoffs", "must be a list of local times of day, not 720"),
    ({"cutoffs": [720]}, "cutoffs", 'must list texts: YAML reads 12:00 without quotes as 720; write "12:00"'),
    ({"cutoffs": [540]}, "cutoffs", 'must list texts: YAML reads 9:00 without quotes as 540; write "09:00"'),
    ({"cutoffs": [12]}, "cutoffs", "must list texts, not 12: put quotes around it"),
    ({"cutoffs": ["12:00", "12:00"]}, "cutoffs", "lists '12:00' twice"),
    ({"cutoffs": [f"00:{n:02}" for n in range(49)]}, "cutoffs", "must list at most 48 local times of day"),
    *(
        (
            {"cutoffs": [text]},
            "cutoffs",
            f'must list local times of day from "00:00" to "23:59", not {text!r}',
        )
        for text in ("24:00", "12:60", "9:00", "12:00:00", "12", "", "-1:00", "12:00\n", "１2:00")
    ),
    *(
        (
            {"timezone": zone},
            "timezone",
            f"must be a zone of the IANA database, as in America/Sao_Paulo, not {said}",
        )
        for zone, said in [
            ("Mars/Olympus", "'Mars/Olympus'"),
            ("utc", "'utc'"),
            ("", "''"),
            ("America", "'America'"),
            ("/etc/localtime", "'/etc/localtime'"),
            ("../UTC", "'../UTC'"),
            ("localtime", "'localtime'"),
            ("right/UTC", "'right/UTC'"),
            ("zone.tab", "'zone.tab'"),
            ("UTC\x00", "'UTC\\x00'"),
            ("A" * 300, f"'{'A' * 40}…'"),
            (None, "null"),
            (3, "3"),
        ]
    ),
    *(({option: "0s"}, option, "must be above zero, not '0s'") for option in POSITIVE),
    *(({option: 0}, option, "0 is a bare number: write it with its unit, as in 10s") for option in POSITIVE),
    *(({option: "-5s"}, option, "must not be negative, and is '-5s'") for option in (*POSITIVE, *ZERO_IS_FINE)),
    *(({option: "3651d"}, option, "must be at most 3650d, not '3651d'") for option in (*POSITIVE, *ZERO_IS_FINE)),
    *(({option: "soon"}, option, f"{TIME}'soon'") for option in (*POSITIVE, *ZERO_IS_FINE)),
    *(({option: False}, option, f"{TIME}false") for option in (*POSITIVE, *ZERO_IS_FINE)),
    *(
        ({option: 10}, option, "10 is a bare number: write it with its unit, as in 10s")
        for option in (*POSITIVE, *ZERO_IS_FINE)
    ),
    *(
        ({option: value}, option, f"must be a whole number from 1 to {most}, not {said}")
        for option, most in CAPS.items()
        for value, said in [
            (0, "0"),
            (-1, "-1"),
            (most + 1, str(most + 1)),
            (10**5000, "a very large number"),
            (10.0, "10.0"),
            (True, "true"),
            ("10", "'10'"),
            ("1 MiB", "'1 MiB'"),
            ([10], "a list"),
        ]
    ),
    *(
        ({option: None}, option, f"must be a whole number from 1 to {most}, not null")
        for option, most in CAPS.items()
        if option != "max_weight"
    ),
    *(
        ({option: value}, option, reason)
        for option in KIND_LISTS
        for value, reason in [
            ("pago", "must be a list of kinds, not 'pago'"),
            ({"pago": 1}, "must be a list of kinds, not a mapping"),
            ({"pago"}, "must be a list of kinds, not a set"),
            (5, "must be a list of kinds, not 5"),
            ([True], "must list texts, not true: put quotes around it"),
            ([None], "must list texts, not null: put quotes around it"),
            ([["pago"]], "must list texts, not a list: put quotes around it"),
            ([""], "must list kinds of 1 to 128 bytes of UTF-8, not ''"),
            (["x" * 129], f"must list kinds of 1 to 128 bytes of UTF-8, not '{'x' * 40}…'"),
            (["é" * 65], f"must list kinds of 1 to 128 bytes of UTF-8, not '{'é' * 40}…'"),
            (["\ud800"], "must list kinds of 1 to 128 bytes of UTF-8, not '\\ud800'"),
            (["a", "b", "a"], "lists 'a' twice"),
            ([f"k{n}" for n in range(1001)], "must list at most 1000 kinds"),
        ]
    ),
    *(({option: value}, option, f"must be {said}") for option, said in CHOICES.items() for value in NO_CHOICE),
    *(({option: None}, option, f"must be {said}") for option, said in CHOICES.items() if option != "order_by"),
]


@pytest.mark.parametrize(
    ("options", "option", "reason"),
    REFUSED,
    ids=[f"{n}-{option[:20]}" for n, (_, option, _) in enumerate(REFUSED)],
)
def test_a_wrong_policy_is_refused_with_option_and_reason(options: dict[str, Any], option: str, reason: str) -> None:
    error = refused({"inactivity": "10s"} | options)
    assert (error.flow, error.field, error.rule) == ("pedido", option, reason)
    assert str(error) == f"policy pedido: {option}: {reason}"
    assert isinstance(error, ValueError)


def test_inactivity_has_no_default() -> None:
    error = refused({"max_age": "1h"})
    assert error.field == "inactivity"
    assert error.rule == "is required: the gap the process itself shows, as in 10s, or null for none"


def test_a_misspelt_option_is_named_before_the_one_that_is_missing_for_it() -> None:
    assert refused({"inactivty": "10s"}).field == "inactivty"


@pytest.mark.parametrize(
    ("options", "said"), [(None, "null"), ([], "a list"), ("10s", "'10s'"), (5, "5"), (True, "true")]
)
def test_a_policy_is_a_mapping(options: object, said: str) -> None:
    error = refused(options)
    assert (error.field, error.rule) == ("policy", f"must be a mapping of options, not {said}")


def test_a_policy_made_directly_is_checked_the_same_way() -> None:
    with pytest.raises(InvalidPolicy, match="max_events: must be a whole number from 1 to 100000, not 0") as caught:
        policy(max_events=0)
    assert caught.value.flow == "(unnamed)"
    assert caught.value.__context__ is None


@pytest.mark.parametrize("flow", ["pedido", "default", "x" * 128, "a%3Ab", "50%", "ação 🚚", "{p}", " "])
def test_a_flow_is_named_as_in_a_bucket_key(flow: str) -> None:
    assert Policy.load(flow, {"inactivity": "10s"}) == policy()


BYTES = "must be 1 to 128 bytes of UTF-8"
ENCODED = "must stand as in a bucket key, with ':' and control characters percent-encoded (%3A)"


@pytest.mark.parametrize(
    ("flow", "said", "rule"),
    [
        ("", "''", BYTES),
        ("x" * 129, f"'{'x' * 40}…'", BYTES),
        ("é" * 65, f"'{'é' * 40}…'", BYTES),
        ("\ud800", "'\\ud800'", BYTES),
        ("a:b", "'a:b'", ENCODED),
        ("a\nb", "'a\\nb'", ENCODED),
        ("a\x85b", "'a\\x85b'", ENCODED),
        (5, "5", "must be text: put quotes around 5"),
        (True, "true", "must be text: put quotes around true"),
    ],
)
def test_what_can_not_stand_in_a_bucket_key_names_no_flow(flow: Any, said: str, rule: str) -> None:
    error = refused({"inactivity": "10s"}, flow)
    assert (error.flow, error.field, error.rule) == (said, "flow", rule)


# The forms a policy is kept in


def test_the_rules_of_a_policy_that_only_names_its_gap() -> None:
    assert policy().rules() == (
        "10000 3600000 1000 1048576 - 65536 - - 0 0 86400000 10 1 r - a a s a 1 0 0 0 e rq 259200000 1209600000"
    )


def test_the_rules_of_a_policy_that_names_everything() -> None:
    assert Policy(**EVERYTHING).rules() == (
        "90000 172800000 50 1000 9007199254740991 2000 60000 0 250 5000 259200000 3 0 n o q r k l 0 1 1 1 t direct"
        " 86400000 86400000"
    )


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"inactivity": None}, {0: "-"}),
        ({"on_conflict": "keep_first"}, {13: "k"}),
        ({"on_conflict": "accept_newer"}, {13: "n"}),
        ({"on_conflict": "reconcile"}, {13: "q"}),
        ({"order_by": "source_version"}, {12: "0", 14: "v"}),
        ({"order_by": "occurred_at"}, {7: "300000", 12: "0", 14: "o"}),
        ({"on_late": "reconcile"}, {15: "q", 16: "q"}),
        ({"on_late": "reject"}, {15: "r", 16: "r"}),
        ({"on_too_old": "reject"}, {16: "r"}),
        ({"on_policy_change": "keep"}, {17: "k"}),
        ({"on_policy_change": "reconcile"}, {17: "q"}),
        ({"keep": "last"}, {12: "0", 18: "l"}),
        ({"ordered": False}, {19: "0"}),
        ({"kinds": ["a"]}, {12: "3", 20: "1", 21: "1"}),
        ({"terminal_kinds": ["a"]}, {12: "2", 21: "1"}),
        ({"starter_kinds": ["a"]}, {12: "2", 21: "1"}),
        ({"requery_kinds": ["a"]}, {12: "2", 21: "1"}),
        ({"cutoffs": ["12:00"]}, {12: "0", 22: "1"}),
        ({"handover": "together"}, {23: "t"}),
        ({"sink": "none"}, {24: "none"}),
        ({"timezone": "Asia/Kathmandu", "payload_ttl": "1d", "metadata_ttl": "2d"}, {25: "86400000", 26: "172800000"}),
    ],
)
def test_each_option_moves_its_own_tokens(options: dict[str, Any], changed: dict[int, str]) -> None:
    before, after = policy().rules().split(" "), policy(**options).rules().split(" ")
    assert len(before) == len(after) == 27
    assert {n: token for n, (token, old) in enumerate(zip(after, before, strict=True)) if token != old} == changed


def test_a_kind_has_the_letters_of_its_lists() -> None:
    assert policy().kind_flags() == {}
    assert Policy(**EVERYTHING).kind_flags() == {
        "ação 🚚": "k",
        "cancelado": "tk",
        "novo": "sk",
        "pago": "tskq",
    }


def test_the_fields_in_the_partition_s_hash() -> None:
    plain = policy()
    assert plain.fields(3, 0) == {"3": plain.rules(), "3:json": plain.canonical_json()}
    full = Policy(**EVERYTHING)
    now = 1_800_000_000_000
    assert full.fields(12, now) == {
        "12": full.rules(),
        "12:json": full.canonical_json(),
        "12:cutoffs": full.cutoff_runs(now),
        "12:kind:ação 🚚": "k",
        "12:kind:cancelado": "tk",
        "12:kind:novo": "sk",
        "12:kind:pago": "tskq",
    }


def test_the_canonical_text_is_pinned() -> None:
    assert policy(kinds=["ação", "b"], cutoffs=["12:00"]).canonical_json() == (
        '{"busy_streak_alert":10,"cutoffs":["12:00"],"deadline_margin":0,"dedupe_ttl":86400000,"handover":"each",'
        '"inactivity":10000,"keep":"all","kinds":["ação","b"],"max_age":3600000,"max_bytes":1048576,'
        '"max_delay":null,"max_event_bytes":65536,"max_events":1000,"max_future":null,"max_weight":null,'
        '"metadata_ttl":1209600000,"on_conflict":"reject","on_late":"accept","on_policy_change":"split",'
        '"on_too_old":"accept","order_by":null,"ordered":true,"payload_ttl":259200000,"requery_kinds":[],'
        '"sink":"rq","starter_kinds":[],"terminal_grace":0,"terminal_kinds":[],"timezone":"UTC"}'
    )


def test_equal_content_is_equal_text_however_it_was_written() -> None:
    short = policy(terminal_kinds=["b", "a"], cutoffs=["17:30", "12:00"], on_late="reject")
    long = Policy(
        on_too_old="reject",
        on_late="reject",
        cutoffs=("12:00", "17:30"),
        terminal_kinds=["a", "b"],
        starter_kinds=None,
        max_age="60m",
        dedupe_ttl="1d",
        max_future=None,
        kinds=None,
        inactivity="10000ms",
    )
    assert short == long
    assert short.canonical_json() == long.canonical_json()


KINDS = st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True)
DURATIONS = st.integers(1, MAX_DURATION_MS).map(format_duration)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_events": st.integers(1, 100_000),
    "max_bytes": st.integers(1, 256 * MIB),
    "max_weight": st.none() | st.integers(1, 2**53 - 1),
    "max_event_bytes": st.integers(1, 8 * MIB),
    "terminal_kinds": KINDS,
    "starter_kinds": KINDS,
    "requery_kinds": KINDS,
    "terminal_grace": st.just(0) | DURATIONS,
    "cutoffs": st.lists(st.times().map(lambda t: f"{t:%H:%M}"), max_size=4, unique=True),
    "timezone": st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo"]),
    "deadline_margin": st.just(0) | DURATIONS,
    "dedupe_ttl": DURATIONS,
    "on_conflict": st.sampled_from(["reject", "keep_first", "accept_newer", "reconcile"]),
    "order_by": st.sampled_from([None, "source_version", "occurred_at"]),
    "on_late": st.sampled_from(["accept", "reconcile", "reject"]),
    "max_delay": st.none() | DURATIONS,
    "on_too_old": st.sampled_from(["accept", "reconcile", "reject"]),
    "max_future": st.none() | st.just(0) | DURATIONS,
    "on_policy_change": st.sampled_from(["split", "keep", "reconcile"]),
    "keep": st.sampled_from(["all", "last"]),
    "ordered": st.booleans(),
    "handover": st.sampled_from(["each", "together"]),
    "busy_streak_alert": st.integers(1, 2**31 - 1),
    "sink": st.sampled_from(["rq", "direct", "webhook", "none"]),
}


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=VALUES))
    low, high = sorted(draw(st.tuples(st.integers(1, MAX_DURATION_MS), st.integers(1, MAX_DURATION_MS))))
    options["inactivity"] = draw(st.sampled_from([None, format_duration(low)]))
    options["max_age"] = format_duration(high)
    if draw(st.booleans()):
        options["payload_ttl"], options["metadata_ttl"] = format_duration(low), format_duration(high)
    if draw(st.booleans()):
        lists = ("terminal_kinds", "starter_kinds", "requery_kinds")
        options["kinds"] = sorted({"k"}.union(*(options.get(name, ()) for name in lists)))
    return options


@given(policies(), policies())
def test_the_canonical_text_tells_everything_and_nothing_else(one: dict[str, Any], two: dict[str, Any]) -> None:
    first, second = Policy(**one), Policy(**two)
    text = first.canonical_json()
    assert Policy.from_json(text) == first
    assert Policy.from_json(text).canonical_json() == text
    assert list(json.loads(text)) == sorted(Policy.model_fields)
    assert (first == second) == (text == second.canonical_json())


def test_an_option_that_an_older_release_did_not_know_has_its_default() -> None:
    kept = json.loads(policy(max_events=7).canonical_json())
    del kept["sink"], kept["handover"]
    assert Policy.from_json(json.dumps(kept)) == policy(max_events=7)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "5", "[" * 100_000])
def test_a_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        Policy.from_json(text)
    assert (caught.value.field, caught.value.rule) == ("policy", "is not the JSON text of a policy")


def test_a_stored_text_is_checked_like_a_written_one() -> None:
    with pytest.raises(InvalidPolicy, match="inactivity: must not be above max_age"):
        Policy.from_json('{"inactivity":7200000}')
    with pytest.raises(InvalidPolicy, match="shininess: is unknown"):
        Policy.from_json('{"inactivity":1000,"shininess":1}')
    with pytest.raises(InvalidPolicy, match="max_age: must be a whole number and a unit"):
        Policy.from_json('{"inactivity":1000,"max_age":true}')


# Cut-offs


def instants(runs: str) -> list[int]:
    numbers = [int(token) for token in runs.split(" ")] if runs else []
    starts = numbers[::2]
    assert starts == sorted(starts)
    return [start + n * DAY_MS for start, count in zip(starts, numbers[1::2], strict=True) for n in range(count)]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


@lru_cache(maxsize=64)
def minute_by_minute(zone: str, around: date) -> tuple[int, int, dict[int, int]]:
    """(first, last, local minute → UTC minute) around a date: a clock is watched, minute after minute.

    It knows nothing of folds and gaps, and only turns UTC into local time. A local minute counts when it
    first shows; one that was jumped over comes as much later as the clock jumped: as many minutes after the
    jump as it lies after the last minute shown.
    """
    info = ZoneInfo(zone)
    midday = int(datetime(around.year, around.month, around.day, 12, tzinfo=UTC).timestamp()) // 60
    first, last = midday - 3 * 1440, midday + 3 * 1440
    fell: dict[int, int] = {}
    shown_before: int | None = None
    # Two days earlier, so that a minute that came twice is known to have been there.
    for minute in range(first - 2 * 1440, last + 1):
        offset = datetime.fromtimestamp(minute * 60, info).utcoffset()
        assert offset is not None
        assert offset % timedelta(minutes=1) == timedelta()
        shown = minute + offset // timedelta(minutes=1)
        if shown_before is not None:
            for jumped in range(shown_before + 1, shown):
                fell.setdefault(jumped, minute + jumped - (shown_before + 1))
        fell.setdefault(shown, minute)
        shown_before = shown
    return first, last, fell


def expected(zone: str, around: date, cutoffs: list[str]) -> set[int]:
    first, last, fell = minute_by_minute(zone, around)
    wanted = {int(text[:2]) * 60 + int(text[3:]) for text in cutoffs}
    return {minute * 60_000 for local, minute in fell.items() if local % 1440 in wanted and first <= minute <= last}


def found(zone: str, around: date, cutoffs: list[str], years: int = 1) -> set[int]:
    first, last, _ = minute_by_minute(zone, around)
    runs = policy(cutoffs=cutoffs, timezone=zone).cutoff_runs(first * 60_000 + DAY_MS, years)
    return {instant for instant in instants(runs) if first * 60_000 <= instant <= last * 60_000}


CHANGES = [
    ("America/New_York", date(2026, 3, 8)),
    ("America/New_York", date(2026, 11, 1)),
    ("America/New_York", date(2044, 3, 13)),  # past the table in the zone's file: from its rule
    ("Europe/Berlin", date(2026, 3, 29)),
    ("Europe/Berlin", date(2026, 10, 25)),
    ("Australia/Lord_Howe", date(2026, 4, 5)),  # half an hour
    ("Australia/Lord_Howe", date(2026, 10, 4)),
    ("Pacific/Apia", date(2011, 9, 24)),
    ("Pacific/Apia", date(2011, 12, 30)),  # a day that never was
    ("Pacific/Apia", date(2012, 4, 1)),
    ("America/Sao_Paulo", date(2018, 11, 4)),  # midnight is skipped
    ("America/Sao_Paulo", date(2019, 2, 17)),  # the last hour of the day comes twice
    ("Africa/Casablanca", date(2026, 2, 15)),  # around Ramadan
    ("Africa/Casablanca", date(2026, 3, 22)),
    ("Atlantic/Azores", date(2026, 10, 25)),  # the first hour of the day comes twice
    ("Antarctica/Troll", date(2026, 3, 29)),  # two hours
    ("America/Caracas", date(2016, 5, 1)),
    ("Asia/Pyongyang", date(2018, 5, 5)),  # half an hour at the end of the day
    ("Europe/Dublin", date(2026, 10, 25)),  # winter is the exception there
]
CALM = [
    ("Asia/Kathmandu", date(2026, 3, 29)),
    ("UTC", date(2026, 3, 29)),
    ("America/Sao_Paulo", date(2026, 11, 1)),
]


@pytest.mark.parametrize(("zone", "around"), CHANGES + CALM)
def test_cutoffs_fall_when_the_clock_on_the_wall_says_so(zone: str, around: date) -> None:
    first, last, _ = minute_by_minute(zone, around)
    offsets = {datetime.fromtimestamp(m * 60, ZoneInfo(zone)).utcoffset() for m in (first, last)}
    assert len(offsets) == (2 if (zone, around) in CHANGES else 1)
    cutoffs = [f"{n // 2:02}:{n % 2 * 30:02}" for n in range(48)]
    assert found(zone, around, cutoffs) == expected(zone, around, cutoffs)
    assert len(expected(zone, around, cutoffs)) >= 5 * 48


@given(
    st.sampled_from(CHANGES + CALM),
    st.lists(st.times().map(lambda t: f"{t:%H:%M}"), min_size=1, max_size=5, unique=True),
)
def test_any_cutoffs_fall_when_the_clock_on_the_wall_says_so(where: tuple[str, date], cutoffs: list[str]) -> None:
    assert found(*where, cutoffs) == expected(*where, cutoffs)


@pytest.mark.parametrize(
    ("zone", "cutoff", "instant"),
    [
        ("America/New_York", "02:30", "2026-03-08T03:30:00-04:00"),  # skipped
        ("America/New_York", "01:30", "2026-11-01T01:30:00-04:00"),  # twice
        ("Australia/Lord_Howe", "02:15", "2026-10-04T02:45:00+11:00"),
        ("America/Sao_Paulo", "00:00", "2018-11-04T01:00:00-02:00"),
        ("Pacific/Apia", "12:00", "2011-12-31T12:00:00+14:00"),
        ("Asia/Kathmandu", "17:00", "2026-05-01T11:15:00+00:00"),
    ],
)
def test_a_cutoff_at_an_odd_local_time(zone: str, cutoff: str, instant: str) -> None:
    at = ms(instant)
    coming = [i for i in instants(policy(cutoffs=[cutoff], timezone=zone).cutoff_runs(at)) if abs(i - at) < DAY_MS // 2]
    assert coming == [at]


def test_the_day_that_was_skipped_breaks_no_run() -> None:
    noon = policy(cutoffs=["12:00"], timezone="Pacific/Apia")
    numbers = noon.cutoff_runs(ms("2011-12-28T00:00:00+00:00"), years=1).split(" ")
    # From 27 December 2011 to the end of summer time on 1 April 2012: a day apart, with no instant twice.
    assert numbers[:2] == [str(ms("2011-12-27T22:00:00+00:00")), "95"]


def test_runs_are_one_pair_a_cutoff_where_the_clock_never_changes() -> None:
    now = ms("2026-10-16T14:00:00+00:00")
    assert policy(cutoffs=["17:30", "12:00"]).cutoff_runs(now) == (
        f"{ms('2026-10-15T12:00:00+00:00')} 3661 {ms('2026-10-15T17:30:00+00:00')} 3661"
    )
    assert policy().cutoff_runs(now) == ""


@pytest.mark.parametrize("now", ["2026-10-16T00:00:00+00:00", "2026-10-16T23:59:59.999+00:00"])
def test_runs_cover_a_day_before_and_ten_years_after(now: str) -> None:
    at = ms(now)
    for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "America/New_York"):
        for cutoff in ("00:00", "12:00", "23:59"):
            coming = sorted(instants(policy(cutoffs=[cutoff], timezone=zone).cutoff_runs(at)))
            assert coming[0] <= at, "one lies in the day before"
            assert coming[-1] >= ms(now.replace("2026", "2036")) - DAY_MS
            steps = {later - earlier for earlier, later in pairwise(coming)}
            assert steps <= {DAY_MS - 3_600_000, DAY_MS, DAY_MS + 3_600_000}


def test_runs_are_computed_once_a_day() -> None:
    one = policy(cutoffs=["12:00"], timezone="Europe/Berlin")
    two = policy(cutoffs=["12:00"], timezone="Europe/Berlin", max_events=5)
    start = ms("2026-10-16T00:00:00+00:00")
    assert one.cutoff_runs(start) is two.cutoff_runs(start + DAY_MS - 1)
    assert one.cutoff_runs(start) != one.cutoff_runs(start + DAY_MS)
