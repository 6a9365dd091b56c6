"""Every call of the spec API with bad values ends in one ValueError with a rule and what it got."""

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import duotone
from duotone import CacheSpec, KVSpec, LayerRule, Sharing, TensorSpec
from duotone.quant.eviction import Eviction
from duotone.quant.schemes import SCHEMES

RECORDS = (TensorSpec, KVSpec, CacheSpec, LayerRule, Sharing, Eviction)


def nested(depth: int) -> list:
    made: list = []
    for _ in range(depth):
        made = [made]
    return made


def cyclic() -> dict:
    made: dict = {}
    made["key"] = made["visual"] = made
    return made


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


BAD: tuple[Callable[[], Any], ...] = (
    *(lambda x=x: x for x in (None, True, False, -1, 0, 3, 5, 2**31, 2**64, 10**400, 10**5000)),
    *(lambda x=x: x for x in (0.5, 1.0, 2.0, -0.0, 1e308, math.nan, math.inf, -math.inf, 1j)),
    *(lambda x=x: x for x in ("", "text", "dense", "fit", "hadamard", "klt:", "\ud800", "1" * 999)),
    lambda: f"klt:x#{'9' * 5000}.key",
    *(lambda x=x: x for x in (b"bits", (), (1,), (0, 3), (None, 1), ((4, 0.5),), ((2, 1), (4, 1)))),
    *(lambda x=x: x for x in (((10**400, 1),), ((4, 10**400),), ((4, math.nan),), (10**308,) * 2)),
    list,
    lambda: [1, 2],
    lambda: [[4, 0.125], [2, 0.25]],
    dict,
    lambda: {"bits": 2},
    lambda: {"bits": [1]},
    lambda: {"key": 1},
    lambda: {"key": {"bits": 2}, "value": {"bits": 2}},
    lambda: {None: 1, "x": 2},
    lambda: {1, 2},
    lambda: range(3),
    lambda: nested(3),
    lambda: nested(5_000),
    cyclic,
    object,
    Unprintable,
    lambda: TensorSpec,
    lambda: TensorSpec(2),
    lambda: KVSpec(),
    lambda: np.ones(2),
    lambda: np.float32(0.25),
    lambda: np.int64(2),
    lambda: torch.ones(2),
    lambda: torch.tensor(2),
)
TEXTS = (
    "",
    "{",
    "[]",
    "null",
    "3",
    "NaN",
    '{"bits": NaN}',
    '{"bits": 1e999}',
    '{"bits": 1, "bits": 2}',
    '{"bits": %s}' % ("9" * 5000),
    "[" * 10_000,
    "[" * 10_000 + "]" * 10_000,
    '{"visual":' * 10_000 + "1" + "}" * 10_000,
    '{"visual": {"key": %s}}' % ("[" * 500 + "]" * 500),
    "\ud800",
)


def fields_of(cls: type, draw: random.Random) -> dict[str, Any]:
    """Some fields of a record, half of them bad, now and then one that it does not have."""
    known, plain = list(cls.__dataclass_fields__), cls()
    names = draw.sample(known, draw.randint(1, min(3, len(known))))
    if draw.random() < 0.1:
        names.append(draw.choice(("foo", "self", "cls", "data", "bit", "")))
    good = {name: getattr(plain, name) for name in known}
    return {
        name: good[name] if name in good and draw.random() < 0.5 else draw.choice(BAD)()
        for name in names
    }


def a_call(draw: random.Random) -> Callable[[], Any]:
    """One call of the API; its values are drawn now, so that the call can be repeated."""
    cls = draw.choice(RECORDS)
    given, value = fields_of(cls, draw), draw.choice(BAD)()
    name = draw.choice(list(SCHEMES))
    knobs = ("bits", "lk", "kq", "km", "eta1", "layers", "gamma", "keep", "mapping", "pictures")
    knob = draw.choice(knobs)
    text = draw.choice(TEXTS)
    whole = cls().to_dict() | given
    return draw.choice(
        (
            lambda: cls(**given),
            lambda: cls(value),
            lambda: cls(*[value] * 40),
            lambda: cls(value, **given),
            lambda: cls().replace(**given),
            lambda: cls.from_dict(given),
            lambda: cls.from_dict(whole),
            lambda: cls.from_dict(value),
            lambda: cls.from_json(value),
            lambda: cls.from_json(text),
            lambda: CacheSpec(layers=[given]),
            lambda: CacheSpec(layers=(value, value)),
            lambda: duotone.scheme(name, **{knob: value}),
            lambda: duotone.scheme(value),
            lambda: duotone.scheme("kivi").replace(**given),
            lambda: CacheSpec().check_depth(value),
            lambda: CacheSpec().nominal_bits(value if value is not True else 1),
        )
    )


def outcome(call: Callable[[], Any]) -> str:
    """ "made" or "refused"; whatever else a call raises fails the test."""
    try:
        made = call()
    except ValueError as error:
        return _refused(str(error))
    if isinstance(made, RECORDS):
        json.dumps(made.to_dict(), allow_nan=False)
        assert type(made).from_json(made.to_json()) == made
        assert hash(made) == hash(made.replace())
    if isinstance(made, CacheSpec):
        assert made.nominal_bits(4) > 0
        assert made.flush_tokens > 0
    return "made"


def _refused(message: str) -> str:
    assert "got" in message
    assert len(message) < 2000
    return "refused"


def check(calls: int, seed: int) -> dict[str, int]:
    draw, counts = random.Random(seed), {"made": 0, "refused": 0}
    for _ in range(calls):
        counts[outcome(a_call(draw))] += 1
    return counts


def test_bad_values_raise_one_error() -> None:
    counts = check(1500, seed=0)
    assert min(counts.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_thousands_of_bad_values_raise_one_error(seed: int) -> None:
    assert min(check(5000, seed).values()) > 50


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("cls", RECORDS)
def test_no_text_raises_what_python_raises(cls: type, text: str) -> None:
    with pytest.raises(ValueError, match="got"):
        cls.from_json(text)


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_every_field_takes_or_refuses_every_value(bad: Callable[[], Any]) -> None:
    for cls in RECORDS:
        for name in cls.__dataclass_fields__:
            outcome(lambda cls=cls, name=name: cls(**{name: bad()}))
            outcome(lambda cls=cls, name=name: cls.from_dict(cls().to_dict() | {name: bad()}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorSpec(foo=1), r"TensorSpec has the fields .*; got \['foo'\]"),
        (lambda: TensorSpec(1, bits=2), r"takes each field once; got \['bits'\]"),
        (lambda: KVSpec(TensorSpec(), TensorSpec(), TensorSpec()), "at most 2 values; got 3"),
        (lambda: KVSpec(key="int4"), r"KVSpec\.key must be"),
        (lambda: CacheSpec.from_dict({}), r"must have the field visual; got \{\}"),
        (lambda: CacheSpec.from_dict({"text": "dense"}), "must have the field visual"),
        (lambda: CacheSpec.from_dict({"visual": {}}), "KVSpec must have the field key"),
        (lambda: KVSpec.from_dict({"key": {"bits": 2}}), "must have the field value"),
        (lambda: KVSpec.from_dict({"key": {}, "value": {}}), "the field bits or classes"),
        (lambda: TensorSpec.from_dict({"group": 4}), "the field bits or classes"),
        (lambda: CacheSpec.from_dict(None), "a CacheSpec is a JSON object; got None"),
        (lambda: duotone.scheme(None), "a scheme's name is a text; got None"),
        (lambda: duotone.scheme("vl-cache", bits="1"), "bits must be an integer; got '1'"),
        (lambda: TensorSpec(group=10**5000), "got a value of type int that Python cannot print"),
        (lambda: TensorSpec(bits=nested(5_000)), "a value of type list that Python cannot"),
        (
            lambda: CacheSpec(
                text=KVSpec(TensorSpec(group=2**30), TensorSpec(group=2**30 + 1)), visual="text"
            ),
            r"a common multiple below 2\*\*31",
        ),
    ],
)
def test_names_the_rule(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
