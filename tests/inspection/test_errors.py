"""Errors of schemes on tiny models, against caches read token by token."""

import json

import pytest
import torch

import duotone
from duotone.calibrate import Settings, calibrate, calibration_data, gather_moments, write
from duotone.calibrate.files import files_of
from duotone.calibrate.moments import answer
from duotone.hf.facts import model_facts
from duotone.inspection.answered import Answered, packed_tokens, sequences
from duotone.inspection.errors import ErrorMeter
from duotone.inspection.queries import QueryRecorder
from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

from families import tiny_model as family_model

GROUPED = duotone.KVSpec(
    key=duotone.TensorSpec(bits=2, group=8), value=duotone.TensorSpec(bits=2, group=8)
)
STREAM = duotone.CacheSpec(visual="text", text=GROUPED, recent=8)
EIGHT = duotone.CacheSpec(
    visual=duotone.KVSpec(key=duotone.TensorSpec(bits=8), value=duotone.TensorSpec(bits=8))
)


@pytest.fixture(scope="module")
def pictured():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    return loaded, calibration_data(loaded, [TINY_TASK], 4, 2).batches


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    loaded = Loaded("words", text_model(), LetterTokenizer())
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"question": "once upon a time " * n, "answers": ["x"]} for n in (4, 3)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    return loaded, calibration_data(loaded, [duotone.tasks.get_task(str(rows))], 2, 2).batches


def measure_errors(model, batches, schemes, progress=None):
    meter = ErrorMeter(model, batches, schemes)
    gather_moments(model, batches, progress=progress, audience=meter)
    return meter.entries()


def mean(entry, name):
    return sum(row[name] for row in entry["layers"]) / len(entry["layers"])


def test_exact_schemes_have_no_errors_and_fewer_bits_have_more(pictured):
    loaded, batches = pictured
    schemes = {"dense": duotone.scheme("dense"), "8": EIGHT}
    schemes |= {f"{b}": duotone.scheme("minmax", bits=b) for b in (4, 2, 1)}
    done = []
    found = measure_errors(loaded.model, batches, schemes, done.append)
    assert done == [1, 2]
    for name, least in (("weights_mse", 1e-6), ("output_error", 0.02)):
        errors = [mean(entry, name) for entry in found]
        assert errors[0] == 0
        assert errors[1] < least
        assert errors == sorted(errors)
    assert json.loads(json.dumps(found)) == found


def test_histograms_count_every_score_of_visual_tokens(pictured):
    loaded, batches = pictured
    (entry,) = measure_errors(loaded.model, batches, {"8": EIGHT})
    expected, recorder = 0, QueryRecorder(model_facts(loaded.model))
    for given in batches:
        batch, _ = answer(loaded.model, given, recorder)
        for row, visual in enumerate(batch.visual_mask.sum(1).tolist()):
            expected += 4 * visual * len(recorder.kept[1].of_sequence(row)[1])
    for row in entry["layers"]:
        assert row["samples"] == 4
        assert sum(row["exact"]["counts"]) == sum(row["scores"]["counts"]) == expected


@torch.no_grad()
def test_queries_see_what_the_model_lets_them_see(pictured):
    """Exact outputs equal the model's own: its attention is caught on the way."""
    loaded, batches = pictured
    recorder = QueryRecorder(model_facts(loaded.model))
    # Questions of different lengths: other tokens count in one sequence than in the other.
    batch, dense = answer(loaded.model, batches[1], recorder)
    answered = Answered(batch, dense, recorder)
    cache = answered.quantized(loaded.model, EIGHT)
    own = loaded.model.get_decoder().layers[0].self_attn
    seen = {}
    hook = own.o_proj.register_forward_hook(lambda _, x, y: seen.update(x=x[0]))
    loaded.model(**batch.model_inputs)
    hook.remove()
    pieces = list(sequences(answered, cache, 0))
    cache.detach()
    assert len(pieces) == 2
    for row, (exact, _, _) in enumerate(pieces):
        output = exact.output(exact.weights(exact.scores()))
        _, places = recorder.kept[0].of_sequence(row)
        prompt = places < answered.prompt_tokens
        expected = seen["x"][row, places[prompt]].unflatten(-1, (4, 16)).transpose(0, 1)
        torch.testing.assert_close(output[:, prompt], expected, atol=1e-4, rtol=1e-4)


def test_tokens_stay_together_where_a_cache_orders_them(pictured, tmp_path):
    """Wide codes in calibrated bases, foreground first: in one order there is hardly an error."""
    loaded, batches = pictured
    file = str(files_of(tmp_path / "wide")[0])
    bases, spec, _ = calibrate(loaded, batches, Settings(bits=8.0, widths=(0, 8)), file=file)
    write(bases, spec, tmp_path / "wide")
    assert spec.background is not None
    (entry,) = measure_errors(loaded.model, batches, {"wide": spec})
    assert mean(entry, "output_error") < 0.05
    assert all(row["exact"]["counts"] != [] for row in entry["layers"])
    recorder = QueryRecorder(model_facts(loaded.model))
    answered = Answered(*answer(loaded.model, batches[0], recorder), recorder)
    cache = answered.quantized(loaded.model, spec)
    (exact, _), (coded, _) = answered.states(cache, 1)
    cache.detach()
    assert not torch.equal(exact[:, :, :-1], answered.dense.layers[1].keys[:, :, :-1])
    cut = answered.batch.visual_mask[0].nonzero()[:, 0]
    torch.testing.assert_close(coded[0][:, cut], exact[0][:, cut], atol=0.1, rtol=0.1)


def test_schemes_with_calibration_are_seen_with_and_without_it(pictured):
    loaded, batches = pictured
    spec = duotone.scheme("minmax", bits=1)
    schemes = {"plain": spec, "moved": spec.replace(tau=(0, 1))}
    plain, without, moved = measure_errors(loaded.model, batches[:1], schemes)
    assert [e["label"] for e in (plain, without, moved)] == ["plain", "moved, no tau", "moved"]
    assert plain["layers"] == without["layers"] != moved["layers"]
    assert (without["tau"], moved["tau"]) == (None, [0.0, 1.0])


def test_text_models_by_the_tokens_that_are_packed(words):
    loaded, batches = words
    (entry,) = measure_errors(loaded.model, batches, {"stream": STREAM})
    lengths = batches[0].tensors["attention_mask"].sum(1)
    packed = [(n - 8) // 8 * 8 for n in lengths.tolist()]
    queries = batches[
        0
    ].answer_tokens  # the last token's of the prompt, and of all but one answer's
    for row in entry["layers"]:
        assert sum(row["scores"]["counts"]) == 2 * queries * sum(packed)
        assert row["weights_mse"] > 0


def test_a_text_model_has_no_scores_for_tau_to_move(words):
    loaded, batches = words
    spec = duotone.CacheSpec(visual=GROUPED, text=GROUPED, recent=8, tau=(0, 2))
    without, with_tau = measure_errors(loaded.model, batches, {"mixed": spec})
    assert without["layers"] == with_tau["layers"]


def test_packed_tokens_leave_windows_and_padding_out(words):
    loaded, batches = words
    recorder = QueryRecorder(model_facts(loaded.model))
    answered = Answered(*answer(loaded.model, batches[0], recorder), recorder)
    cache = answered.quantized(loaded.model, STREAM)
    found = packed_tokens(cache.steps.state(0), answered.prompt_tokens)
    cache.detach()
    for row, real in zip(found, batches[0].tensors["attention_mask"], strict=True):
        start, count = int(real.argmax()), int(real.sum() - 8) // 8 * 8
        assert row.nonzero()[:, 0].tolist() == list(range(start, start + count))


REFUSED = {
    "eviction": (lambda: duotone.scheme("vl-cache"), "evicts"),
    "another model's bases": (lambda: duotone.CacheSpec.from_dict(foreign()), "cannot be read"),
}


def foreign():
    transform = "klt:nowhere.safetensors#0.key"
    key = {"transform": transform, "classes": [[1, 0.5]]}
    return {"visual": {"key": key, "value": {"bits": 1}}}


@pytest.mark.parametrize("name", REFUSED)
def test_schemes_that_cannot_be_compared_are_refused_before_the_model_runs(name, pictured):
    made, message = REFUSED[name]
    loaded, batches = pictured
    with pytest.raises(ValueError, match=message):
        measure_errors(loaded.model, batches, {"it": made()}, lambda _: pytest.fail("it ran"))


def test_schemes_that_pack_nothing_of_a_text_are_refused(words):
    loaded, batches = words
    for spec in (STREAM.replace(recent=500), duotone.scheme("dense")):
        with pytest.raises(ValueError, match="must pack some of the prompts' tokens"):
            measure_errors(loaded.model, batches, {"it": spec})


def test_sliding_windows_are_refused():
    with pytest.raises(ValueError, match="sliding windows in 'gemma3'"):
        measure_errors(family_model("gemma3"), [], {"it": duotone.scheme("minmax")})
