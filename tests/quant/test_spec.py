import inspect
import json
import subprocess
import sys

import pytest

import duotone
from duotone import SCHEMES, CacheSpec, KVSpec, TensorSpec


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_schemes_survive_json(name: str, bits: int) -> None:
    takes_bits = "bits" in inspect.signature(SCHEMES[name].build).parameters
    spec = duotone.scheme(name, **({"bits": bits} if takes_bits else {}))
    assert CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert CacheSpec.from_json(spec.to_json()) == spec
    assert hash(spec) == hash(CacheSpec.from_json(spec.to_json()))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"along": "heads"}, "along must be one of"),
        ({"group": 0}, "group must be a positive integer"),
        ({"group": 2.5}, "group must be a positive integer"),
        ({"mapping": "affine"}, "mapping must be one of"),
        ({"hybrid_at": "decode"}, "hybrid_at must be one of"),
        ({"hybrid_at": "prefill"}, "needs mapping='hybrid'"),
        ({"eta": 0.5}, "eta must lie in"),
        ({"shrink": 0.0}, "shrink must lie in"),
        ({"levels": "kmeans"}, "levels must be one of"),
        ({"gain": -1.0}, "gain must be positive"),
        ({"gain": "auto"}, "positive or 'fit'"),
        ({"gain": 1.3, "mapping": "symmetric"}, "gain != 1 needs"),
        ({"gain": "fit", "along": "channels"}, "needs along='tokens'"),
        ({"energy": -1.0}, "energy must lie in"),
        ({"energy": 3}, "energy must lie in"),
        ({"energy": 1.0, "along": "channels"}, "needs along='tokens'"),
        ({"energy": 1.0, "mapping": "symmetric"}, "mapping='asymmetric'"),
        ({"classes": ((2, 0.25), (4, 0.25))}, "bits falling"),
        ({"classes": ((5, 0.25),)}, "bits falling"),
        ({"classes": ()}, "1 to 3 pairs"),
        ({"classes": ((4, 0.75), (2, 0.5))}, "sum to at most 1"),
        ({"classes": ((4, 0.0),)}, "sum to at most 1"),
        ({"classes": ((4, 0.5),), "along": "channels"}, "need along='tokens'"),
        ({"classes": ((4, 0.5),), "mapping": "symmetric"}, "mapping='asymmetric'"),
        ({"transform": "klt:file#1.query"}, "transform must be None"),
        ({"param_dtype": "int8"}, "param_dtype must be one of"),
        ({"param_dtype": "float8", "along": "channels"}, "'float8' needs along='tokens'"),
        ({"param_dtype": "float8", "mapping": "hybrid"}, "mapping='asymmetric'"),
        ({"param_dtype": "float8", "bits": 8}, "'float8' needs codes of"),
        ({"param_dtype": "float8", "classes": ((8, 0.5), (1, 0.5))}, "'float8' needs codes of"),
    ],
)
def test_bad_tensor_fields_raise(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        TensorSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"visual": "stream"}, "CacheSpec.visual"),
        ({"text": "text"}, "CacheSpec.text"),
        ({"sink": -1}, "sink must be an integer"),
        ({"recent": 1.5}, "recent must be an integer"),
        ({"tau": (1,)}, "tau must be None or a pair"),
        ({"tau": (-1, 0)}, "tau must be None or a pair"),
        ({"ranges": "tile"}, "ranges must be"),
        ({"key_norm": True}, "key_norm needs a quantized text"),
        ({"key_norm": 1}, "key_norm must be a bool"),
        ({"text": KVSpec()}, "along tokens needs a group"),
    ],
)
def test_bad_cache_fields_raise(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        CacheSpec(**fields)


STEPS = ((60, 0.08), (128, 1.0))


@pytest.mark.parametrize("pair", [(60, 0.08), [60, 0.08], ((60, 0.08),), [[60, 0.08]]])
def test_one_pair_for_short_spans_is_kept_as_a_tuple_of_pairs(pair: object) -> None:
    spec = CacheSpec(short_foreground=pair)
    assert spec.short_foreground == spec.short_steps == ((60, 0.08),)
    assert spec == CacheSpec(short_foreground=(60, 0.08))
    assert json.loads(spec.to_json())["short_foreground"] == [60, 0.08]
    assert CacheSpec.from_json(spec.to_json()) == spec.replace() == spec
    assert hash(CacheSpec.from_json(spec.to_json())) == hash(spec)


@pytest.mark.parametrize("steps", [STEPS, [list(step) for step in STEPS], [STEPS[0], [128, 1]]])
def test_steps_for_short_spans_survive_json(steps: object) -> None:
    spec = CacheSpec(short_foreground=steps)
    assert spec.short_foreground == spec.short_steps == STEPS
    assert json.loads(spec.to_json())["short_foreground"] == [[60, 0.08], [128, 1.0]]
    assert CacheSpec.from_json(spec.to_json()) == spec.replace() == spec
    assert hash(CacheSpec.from_json(spec.to_json())) == hash(spec)


def test_no_pair_for_short_spans_stays_none() -> None:
    spec = CacheSpec()
    assert (spec.short_foreground, spec.short_steps) == (None, ())
    assert spec.to_dict()["short_foreground"] is None


@pytest.mark.parametrize(
    "bad",
    [
        (),
        60,
        "60",
        (60,),
        (60, 0.08, 128),
        (60, 0.08, 128, 1.0),
        (0.08, 60),
        (-1, 0.5),
        (60, 0),
        (60, 1.01),
        (60, True),
        ((60, 0.08), (128, 0.0)),
        ((60, 0.08), (128, 1.5)),
        ((60, 0.08), (128,)),
        ((60, 0.08), 128),
        ((60, 0.08), None),
        ((),),
        (60, (128, 1.0)),
        {60: 0.08},
    ],
)
def test_what_is_no_pairs_for_short_spans_is_refused(bad: object) -> None:
    rule = r"short_foreground must be \(tokens, share\), a share in \(0, 1\], or None; got .*"
    with pytest.raises(ValueError, match=rule + "or a tuple of such pairs"):
        CacheSpec(short_foreground=bad)


@pytest.mark.parametrize(
    "bad", [((128, 1.0), (60, 0.08)), ((60, 0.08), (60, 1.0)), (*STEPS, (99, 1))]
)
def test_tokens_of_steps_for_short_spans_rise(bad: object) -> None:
    rule = r"tokens of short_foreground must rise; got \(.*The first pair whose tokens exceed"
    with pytest.raises(ValueError, match=rule):
        CacheSpec(short_foreground=bad)


@pytest.mark.parametrize(
    ("tokens", "front"),
    [(1, 1), (49, 4), (59, 5), (60, 60), (64, 64), (127, 127), (128, 64), (256, 128), (300, 128)],
)
def test_the_first_step_above_a_spans_tokens_says_its_share(tokens: int, front: int) -> None:
    spec = CacheSpec(short_foreground=STEPS, foreground=0.4, foreground_multiple=64)
    assert spec.foreground_of(tokens) == front


def test_unknown_schemes_name_their_neighbours() -> None:
    with pytest.raises(ValueError, match="Did you mean calibquant"):
        duotone.scheme("calibquand")
    with pytest.raises(ValueError, match=r"takes \['bits'\]"):
        duotone.scheme("lloyd", width=2)


def test_released_calibquant_shrinks_at_1_bit_only() -> None:
    one, two = (duotone.scheme("calibquant", bits=b).visual for b in (1, 2))
    assert (one.key.shrink, one.value.shrink) == (0.5, 0.3)
    assert (two.key.shrink, two.value.shrink) == (1.0, 1.0)
    assert duotone.scheme("calibquant", bits=4).tau is None


@pytest.mark.parametrize(
    ("mapping", "fields"),
    [
        ("hybrid", ("hybrid", "always")),
        ("hybrid-prefill", ("hybrid", "prefill")),
        ("symmetric", ("symmetric", "always")),
    ],
)
def test_innerq_takes_the_papers_mappings(mapping: str, fields: tuple[str, str]) -> None:
    text = duotone.scheme("innerq", mapping=mapping).text
    for tensor in (text.key, text.value):
        assert (tensor.mapping, tensor.hybrid_at) == fields
    with pytest.raises(ValueError, match="mapping must be one of"):
        duotone.scheme("innerq", mapping="hybrid-decode")


def test_importing_duotone_is_lean() -> None:
    heavy = {"torch", "transformers", "triton"}
    code = f"import duotone, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_of_the_package_is_there() -> None:
    assert all(hasattr(duotone, name) for name in dir(duotone))
    code = "import duotone; duotone.models.duotone_tiny_path()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"CacheSpec", "QuantizedCache", "enable", "plan", "scheme"} < set(dir(duotone))


def test_unknown_attributes_of_the_package_raise() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = duotone.quantise
