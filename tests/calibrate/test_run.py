"""From batches to files and to answers through the cache that they describe."""

import json
from itertools import product

import pytest
import torch
from safetensors import safe_open

import duotone
from duotone.calibrate import (
    Settings,
    calibrate,
    calibration_data,
    check_files,
    gather_moments,
    write,
)
from duotone.calibrate.budget import widths_of
from duotone.calibrate.files import files_of
from duotone.calibrate.profiles import gather_profiles
from duotone.calibrate.run import bases_of, learn, spec_with
from duotone.calibrate.settings import TENSOR_WEIGHTS
from duotone.hf.model.facts import model_facts
from duotone.hf.model.fingerprint import fingerprint
from duotone.inference.batch import generate, make_cache, prepare
from duotone.loading import Loaded
from duotone.quant import KVSpec, LayerRule
from duotone.quant.bases import Bases
from duotone.tune.bits import held
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def pictured():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture(scope="module")
def made(pictured, tmp_path_factory):
    """(bases, spec, report, path of the bases) of a tiny InternVL."""
    out = tmp_path_factory.mktemp("bases") / "mine"
    data = calibration_data(pictured, [TINY_TASK], 6, 4)
    settings = Settings(bits=1.5)
    file = str(files_of(out)[".safetensors"])
    result = calibrate(pictured, data.batches, settings, file=file, data=data.sources)
    write(*result[:2], out)
    return *result, file


def test_the_report_says_what_was_spent_and_on_what(made):
    bases, spec, report, _ = made
    # 9 pictures in 6 spans: parameters of 16 bits would take as much as codes.
    assert 2.25 < report["bits"] < 3
    # 11 tokens of a span are in front, .45 rounded up.
    assert report["bits"] == pytest.approx(spec.replace(foreground=11 / 24).nominal_bits(3))
    header = report["header"]
    assert (header["layers"], header["kv_heads"], header["head_dim"]) == (3, 2, 16)
    assert (header["tokens"], header["spans"]) == (9 * 16, 6)
    (source,) = header["data"]
    assert (source["task"], source["split"], source["samples"]) == ("tiny", "calibration", 6)
    assert json.dumps(header) == json.dumps(bases.header)
    assert all(0 < row["error"] < row["variance"] for row in report["tensors"])


def test_the_spec_names_the_bases_of_every_layer(made):
    _, spec, _, file = made
    for layer, part in product(range(3), ("visual", "background")):
        policy = getattr(spec.at_layer(layer), part)
        assert policy.key.transform == f"klt:{file}#{layer}.key"
        assert policy.value.transform == f"klt:{file}#{layer}.value"
        assert (policy.key.energy, policy.value.energy) == (1.0, 0.5)
    assert (spec.text, spec.ranges, spec.foreground) == ("dense", "run", 0.45)


def test_parameters_of_8_bits_leave_codes_no_more_than_they_save(pictured, made):
    """Codes and a cache's parameters, against as many code bits next to parameters of 16 bits.

    Codes count without what fills up bytes and spans, which is a third of so small ones.
    """
    _, spec, _, file = made
    data = calibration_data(pictured, [TINY_TASK], 6, 4)
    learned = learn(pictured, data.batches, Settings(bits=1.5))
    plain = widths_of(learned.spectra, 1.5, learned.shares, learned.weights)
    facts = model_facts(pictured.model)
    before = spec_with(facts, plain, file, Settings(bits=1.5))
    rules = (LayerRule(i, i + 1, **wide(before.at_layer(i))) for i in range(3))
    before = before.replace(layers=(*before.layers, *rules))
    assert {tensor.param_dtype for tensor in spec.tensors} == {"float8"}
    bits = []
    for one in (before, spec):
        params_bytes = elements = 0
        for batch in (prepare(pictured.model, b.tensors) for b in data.batches):
            cache = make_cache(pictured.model, one, batch)
            generate(pictured.model, batch, cache, 1)
            params_bytes += cache.memory().params_bytes
            elements += held(cache, batch.visual_mask, "visual").elements
        bits.append(one.nominal_bits(3) + 8 * params_bytes / elements)
    assert bits[1] == pytest.approx(bits[0], abs=0.05)


def wide(policies):
    """The policies of pictures with parameters of 16 bits."""
    return {
        part: KVSpec(*(t.replace(param_dtype="float16") for t in (kv.key, kv.value)))
        for part in ("visual", "background")
        if (kv := getattr(policies, part)) is not None
    }


def test_files_come_back(made):
    bases, spec, _, file = made
    loaded = Bases.load(file)
    torch.testing.assert_close(loaded.key, bases.key)
    assert loaded.header == json.loads(json.dumps(bases.header))
    assert duotone.CacheSpec.from_file(file.replace(".safetensors", ".json")) == spec
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("value").shape == (3, 2, 16, 16)


def test_wide_codes_in_the_bases_answer_as_16_bit(pictured, tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.calibrate.transform.WIDTHS", (0, 8))
    model, data = pictured.model, calibration_data(pictured, [TINY_TASK], 4, 4)
    settings, out = Settings(bits=8.0), tmp_path / "wide"
    file = str(files_of(out)[".safetensors"])
    bases, spec, _ = calibrate(pictured, data.batches, settings, file=file)
    write(bases, spec, out)
    batch = prepare(model, data.batches[0].tensors)
    answers = [generate(model, batch, make_cache(model, s, batch), 6) for s in (None, spec)]
    assert answers[0].token_ids == answers[1].token_ids


def test_samples_choose_the_gain_of_whole_spans(pictured, monkeypatch):
    data, whole = calibration_data(pictured, [TINY_TASK], 2, 2), Settings(foreground=None)
    seen = {}

    def chosen(label):
        def nearest(model, bases, specs, batches):
            seen.update({gain: spec.visual.value.gain for gain, spec in specs.items()})
            return label

        monkeypatch.setattr("duotone.calibrate.run.nearest", nearest)
        _, spec, report = calibrate(pictured, data.batches, whole)
        assert report["gain"] == label
        return {spec.at_layer(i).visual.value.gain for i in range(3)}

    assert chosen("fit") == {"fit"}
    assert chosen(None) == {1.25}
    assert seen == {None: 1.25, "fit": "fit"}
    monkeypatch.setattr("duotone.calibrate.run.nearest", None)
    fixed = Settings(foreground=None, gain=1.1)
    assert calibrate(pictured, data.batches, fixed)[1].visual.value.gain == 1.1
    assert calibrate(pictured, data.batches)[2]["gain"] is None


def test_spans_stay_whole_where_that_is_asked_for(pictured):
    data = calibration_data(pictured, [TINY_TASK], 2, 2)
    _, spec, report = calibrate(pictured, data.batches, Settings(foreground=None))
    assert spec.background is None
    assert {spec.at_layer(i).visual.key.levels for i in range(3)} == {"uniform"}
    assert {row["part"] for row in report["tensors"]} == {"visual"}


def test_a_text_model_gets_a_stream(tmp_path):
    loaded = Loaded("words", text_model(), LetterTokenizer())
    rows = tmp_path / "rows.jsonl"
    row = {"question": "once upon a time there was " * 4, "answers": ["x"]}
    rows.write_text("\n".join([json.dumps(row)] * 2))
    task = duotone.tasks.get_task(str(rows))
    data = calibration_data(loaded, [task], 2)
    file = str(tmp_path / "text.safetensors")
    bases, spec, _ = calibrate(loaded, data.batches, Settings(group=32), file=file)
    write(bases, spec, tmp_path / "text")
    assert (spec.visual, spec.text.key.group, spec.text.value.group) == ("text", 32, 32)
    batch = prepare(loaded.model, data.batches[0].tensors)
    generate(loaded.model, batch, make_cache(loaded.model, spec, batch), 4)


def test_a_model_with_pictures_gets_a_stream_where_text_is_asked_for(pictured, tmp_path):
    """Its bases are of the prompts' words alone; parameters take no bits of the codes."""
    data = calibration_data(pictured, [TINY_TASK], 6, 4)
    file, facts = str(tmp_path / "text.safetensors"), model_facts(pictured.model)
    settings = Settings(group=4, recent=2, text=True)
    bases, spec, report = calibrate(pictured, data.batches, settings, file=file)
    assert (spec.visual, spec.background, spec.sink, spec.recent) == ("text", None, 4, 2)
    words = [
        b.tensors["attention_mask"] - (b.tensors["input_ids"] == 2).int() for b in data.batches
    ]
    assert report["header"]["tokens"] == sum(int(mask.sum()) for mask in words)
    assert report["header"]["settings"]["text"] is True
    assert {row["part"] for row in report["tensors"]} == {"text"}
    assert report["bits"] == pytest.approx(2, abs=0.05)
    assert spec.nominal_bits(facts.layers) == pytest.approx(report["bits"])
    for layer in range(facts.layers):
        text = spec.at_layer(layer).text
        assert (text.key.group, text.key.param_dtype) == (4, "float8")
        assert text.value.transform == f"klt:{file}#{layer}.value"
    bases.save(file)
    batch = prepare(pictured.model, data.batches[0].tensors)
    generate(pictured.model, batch, make_cache(pictured.model, spec, batch), 4)


def spectra_of(loaded, settings, shares):
    """(moments, spectra in units of the output) of two samples with equal spans."""
    data = calibration_data(loaded, [TINY_TASK], 2, 2)
    moments = gather_moments(loaded.model, data.batches)
    bases, units = bases_of(moments, settings.floor(shares), {}, [None] * len(moments))
    profiles = gather_profiles(loaded.model, data.batches, bases, shares)
    spectra = {n: (p.cpu() * units[n[:2]][:, None]).mean(0) for n, p in profiles.items()}
    return moments, spectra


def test_spectra_of_keys_and_values_are_in_one_unit(pictured):
    """With all error left in, V costs tr(M S) and K its scores' variance times what V then says."""
    moments, spectra = spectra_of(pictured, Settings(regularization=0.0), {"visual": 1.0})
    layer = moments[0]
    heard = (layer.output * layer.covariance("value")).sum((-2, -1))
    scored = (layer.scores * layer.covariance("key")).sum((-2, -1))
    assert float(spectra[0, "value", "visual"].sum()) == pytest.approx(
        float(heard.mean()), rel=1e-4
    )
    assert float(spectra[0, "key", "visual"].sum()) == pytest.approx(
        float((scored * heard / 2).mean()), rel=1e-4
    )


def test_keys_in_front_vary_more_than_those_behind(pictured):
    _, spectra = spectra_of(pictured, Settings(), {"visual": 0.5, "background": 0.5})
    for layer in range(3):
        front, back = (spectra[layer, "key", part] for part in ("visual", "background"))
        assert float(front.sum()) > float(back.sum()) > 0
        assert (front.diff() <= 0).all()


def test_tensors_of_more_weight_get_more_bits(pictured, monkeypatch):
    shares = {"visual": 0.45, "background": 0.55}
    _, spectra = spectra_of(pictured, Settings(), shares)

    def bits(place, name):
        classes = widths_of(spectra, 1.0, shares)
        return sum(b * s for n, c in classes.items() if n[place] == name for b, s in c)

    def of_key(weight):
        monkeypatch.setitem(TENSOR_WEIGHTS, "key", weight)
        return bits(1, "key")

    def of_foreground(weight):
        monkeypatch.setattr("duotone.calibrate.settings.FOREGROUND_WEIGHT", weight)
        return bits(2, "visual")

    for bits_at in (of_key, of_foreground):
        spent = [bits_at(weight) for weight in (0.01, 1.0, 100.0)]
        assert spent == sorted(spent)
        assert spent[0] < spent[2]
        monkeypatch.undo()


def test_numbers_that_are_not_finite_are_refused():
    model = tiny_model()
    model.get_decoder().layers[1].self_attn.v_proj.weight.data.fill_(float("inf"))
    loaded = Loaded("broken", model, TinyProcessor())
    data = calibration_data(loaded, [TINY_TASK], 1)
    assert data.sources[0]["rows"] == ["calibration-0"] * 2
    with pytest.raises(ValueError, match="must be finite, layer 1's are not"):
        calibrate(loaded, data.batches)


def test_the_digest_knows_content_not_batches(pictured):
    digests = [
        calibration_data(pictured, [TINY_TASK], samples, size).sources[0]["digest"]
        for samples, size in ((4, 4), (4, 1), (3, 4))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_the_fingerprint_knows_shapes_and_settings_not_names_and_types():
    model = tiny_model(seed=0)
    first = fingerprint(model)
    assert fingerprint(tiny_model(seed=1).bfloat16()) == first
    model.config._name_or_path = "elsewhere"
    model.config.transformers_version = "0"
    assert fingerprint(model) == first
    model.config.text_config.rope_parameters["rope_theta"] = 1.0
    assert fingerprint(model) != first
    assert fingerprint(text_model()) != first


REFUSED = {
    "bits": (Settings(bits=9), "bits per channel"),
    "regularization": (Settings(regularization=-1), "regularization must be >= 0"),
    "no foreground": (Settings(foreground=0.0), "foreground must lie in"),
    "no background": (Settings(foreground=1.0), "foreground must lie in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_before_the_model_runs(name, pictured):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        calibrate(pictured, iter(lambda: pytest.fail("a batch was asked for"), None), settings)


def test_bases_of_two_parts_are_all_but_orthogonal(pictured):
    data = calibration_data(pictured, [TINY_TASK], 4, 4)
    bent = {}
    for name, settings in (("parts", Settings()), ("whole", Settings(foreground=None))):
        learned = learn(pictured, data.batches, settings)
        bent[name] = [
            float(torch.linalg.cond(x).max()) for x in (learned.bases.key, learned.bases.value)
        ]
    assert max(bent["parts"]) < 1.1 < 1.5 < max(bent["whole"])


def test_data_without_visual_tokens_are_refused(pictured, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "what is this ?", "answers": ["one"]}))
    with pytest.raises(ValueError, match="1 prompts without any"):
        calibration_data(pictured, [duotone.tasks.get_task(str(rows))], 1)


def test_existing_files_are_kept(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match="never overwritten"):
        check_files(tmp_path / "mine.safetensors")
    assert check_files(tmp_path / "model-2.5")[1].name == "model-2.5.json"
    (tmp_path / "other.text.safetensors").touch()
    with pytest.raises(ValueError, match=r"got the existing .*other.text.safetensors"):
        check_files(tmp_path / "other")
