"""Sensitivity and the study, on a random model of three layers."""

import pytest

import duotone
from duotone.inference.batch import ask_later, encode, prepare
from duotone.tune.build import spec_of
from duotone.tune.prefilled import prefill
from duotone.tune.search import Search
from duotone.tune.seeds import seed_points
from duotone.tune.sensitivity import Sensitivity, measure_sensitivity, probe
from duotone.tune.space import space_for
from duotone.tune.trials import Lost, Meter, Outcome, in_turn, lost_to
from tiny_vlm import TinyProcessor, tiny_example, tiny_model

pytest.importorskip("optuna")
LAYERS = 3
SPACE = space_for(LAYERS, visual=True, text=False)


def batches_of(model, count=2):
    made = []
    for first in range(count):
        conversations = [tiny_example("calibration", 2 * first + i).messages() for i in range(2)]
        batch = ask_later(prepare(model, encode(TinyProcessor(), conversations)))
        made.append(prefill(model, batch, 4))
    return made


@pytest.fixture(scope="module")
def model():
    return tiny_model().double()


@pytest.fixture(scope="module")
def meter(model):
    batches = batches_of(model)
    return Meter(model, {"one": batches, "two": batches[1:]}, "visual")


def search(meter, storage=None, **options):
    ranking = {"key": (2, 0, 1), "value": (0, 1, 2)}
    options = {"seed": 3, "seeds": seed_points(SPACE)[:4], "storage": storage} | options
    return Search(SPACE, meter, ranking, 16.0, **options)


def history(study):
    trials = study.get_trials(deepcopy=False)
    kept = [t for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    return [(t.params, t.state.name, t.values) for t in kept]


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_sensitivity_ranks_a_hurt_layer_first(model, which, layer):
    """One layer's projection is made to vary much more than a cache of 2 bits can follow."""
    hurt = tiny_model().double()
    for block in hurt.model.language_model.layers:
        for name in ("k_proj", "v_proj"):
            getattr(block.self_attn, name).weight.data *= 0.02
    attention = hurt.model.language_model.layers[layer].self_attn
    getattr(attention, {"key": "k_proj", "value": "v_proj"}[which]).weight.data *= 150.0
    found = measure_sensitivity(hurt, batches_of(hurt), LAYERS, spans=True)
    assert found.ranking[which][0] == layer
    assert getattr(found, which)[layer] > 10 * found.baseline


def test_a_probe_changes_one_tensor_of_one_layer():
    spec = probe(1, "value", spans=True)
    bits = [[getattr(spec.at_layer(i).visual, w).bits for w in ("key", "value")] for i in range(3)]
    assert bits == [[8, 8], [8, 2], [8, 8]]
    assert probe(1, "key", spans=False).at_layer(1).text.key.bits == 2


@pytest.mark.parametrize("sampler", [pytest.param("nsga2", marks=pytest.mark.slow), "tpe"])
def test_an_interrupted_study_goes_on_as_if_it_had_not_been(meter, tmp_path, sampler, monkeypatch):
    monkeypatch.setattr("duotone.tune.search.POPULATION", 4)
    whole = search(meter, sampler=sampler)
    whole.run(trials=9)
    parts = search(meter, tmp_path / "journal", sampler=sampler)
    parts.run(trials=2)
    interrupted = search(meter, tmp_path / "journal", sampler=sampler)
    monkeypatch.setattr(interrupted, "_outcome", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(trials=9)
    search(meter, tmp_path / "journal", sampler=sampler).run(trials=5)
    resumed = search(meter, tmp_path / "journal", sampler=sampler)
    resumed.run(trials=9)
    assert resumed.done == whole.done == 9
    assert history(resumed.study) == history(whole.study)
    assert [t.spec for t in resumed.tried] == [t.spec for t in whole.tried]
    other = search(meter, seed=4, sampler=sampler)
    other.run(trials=6)
    assert history(other.study) != history(whole.study)[:6]


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2] + "\n" + text[len(text) // 2 :],
    "no spec": lambda text: text.replace('"spec"', '"speck"'),
    "another spec": lambda text: text.replace('\\"bits\\": ', '\\"bits\\": 1'),
    "no score": lambda text: text.replace('"score"', '"scores"'),
    "a word": lambda text: text.replace('"parts":[', '"parts":["x",'),
    "no number": lambda text: text.replace('"bits":', '"bits":null,"was":'),
    "no operation": lambda text: text.replace('"op_code":0', '"op_code":99'),
    "no text": lambda text: "\x00" + text,
}


@pytest.fixture(scope="module")
def journal(meter, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "journal"
    kept = search(meter, path)
    kept.run(trials=1)
    assert kept.done == len(kept.tried) == 1
    return path.read_text()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_journal_is_named(meter, tmp_path, journal, damage):
    damaged = damage(journal)
    assert damaged != journal
    (tmp_path / "journal").write_text(damaged)
    with pytest.raises(ValueError, match=r"got '.*journal', which is damaged. Delete it .*: "):
        search(meter, tmp_path / "journal")


GOOD = {"key": [0.1, 0.2], "value": [0.3, 0.4], "baseline": 0.01}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": [0.1]}, "'key' has 2 numbers"),
        ({"value": "12"}, "'value' has 2 numbers"),
        ({"value": [0.1, float("nan")]}, "'value' has 2 numbers"),
        ({"baseline": None}, "'baseline' is a finite number"),
    ],
)
def test_a_sensitivity_of_other_layers_is_refused(wrong, message):
    assert Sensitivity.from_dict(GOOD, 2).ranking == {"key": (1, 0), "value": (1, 0)}
    with pytest.raises(ValueError, match=message):
        Sensitivity.from_dict(GOOD | wrong, 2)


def _interrupt(trial, race):
    raise KeyboardInterrupt


def test_first_trials_are_the_seeds(meter):
    study = search(meter)
    study.run(trials=3)
    trials = study.study.get_trials(deepcopy=False)
    assert [t.params for t in trials] == seed_points(SPACE)[:3]
    ranking = {"key": (2, 0, 1), "value": (0, 1, 2)}
    assert study.tried[0].spec == spec_of(seed_points(SPACE)[0], LAYERS, ranking)
    assert study.tried[0].spec == duotone.scheme("duotone-whole")


def test_children_are_near_the_seeds(meter, monkeypatch):
    monkeypatch.setattr("duotone.tune.search.POPULATION", 4)
    study = search(meter)
    study.run(trials=14)
    seeds, children = (
        [t.params for t in study.study.get_trials(deepcopy=False)][part]
        for part in (slice(4), slice(4, None))
    )
    nearest = [min(sum(c[k] != s[k] for k in c) for s in seeds) for c in children]
    assert sorted(nearest)[len(nearest) // 2] <= 6


def test_an_invalid_point_is_pruned_and_a_bug_crashes(meter, monkeypatch):
    contradiction = SPACE.point(policy="stream")
    study = search(meter, seeds=[contradiction])
    study.run(trials=1)
    (trial,) = study.study.get_trials()
    assert trial.state.name == "PRUNED"
    assert "along tokens needs a group" in trial.user_attrs["pruned"]

    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr("duotone.tune.search.spec_of", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        study.run(trials=2)


def test_known_specs_are_measured_once_and_count_for_the_front(meter, tmp_path):
    specs = {"minmax": duotone.scheme("minmax"), "again": duotone.scheme("minmax")}
    study = search(meter, tmp_path / "journal")
    assert list(study.consider(specs)) == ["minmax", "again"]
    assert [(t.number, t.spec) for t in study.tried] == [(-1, specs["minmax"])]
    later = search(meter, tmp_path / "journal")
    later.meter = None  # it would fail if it measured
    list(later.consider(specs))
    assert later.tried == study.tried


def outcome(bits, *parts):
    return Outcome(sum(parts) / len(parts), bits, {}, {}, parts)


def test_a_trial_is_lost_where_fewer_bits_do_clearly_better():
    lost = lost_to([outcome(1.0, -2.0, -3.0), outcome(3.0, -9.0, -9.0)], ceiling=4.0)
    assert lost(1.0, [-1.9]) is None
    assert lost(1.0, [-1.5]) == "1.00 bits do better"
    assert lost(0.9, [-1.5]) is None
    assert lost(1.0, [-2.5, -2.4]) is None
    assert lost(1.0, [-1.5, -2.5]) is None  # both measured whole: no reason to prune
    assert lost(4.1, [-9.9]) == "4.10 bits are above 4.00"


def test_a_lost_trial_stops_after_the_batch_that_decides(meter):
    seen = []

    def rival(bits, parts):
        seen.append(len(parts))
        return "enough" if len(parts) == 2 else None

    with pytest.raises(Lost, match="enough"):
        meter.outcome(duotone.scheme("minmax"), rival)
    assert seen == [1, 2]


def test_batches_of_tasks_take_turns(meter):
    assert [name for name, _ in in_turn(meter.batches)] in (
        ["one", "two", "one"],
        ["two", "one", "one"],
    )


def test_the_score_is_the_mean_over_tasks_of_log_kl(meter):
    found = meter.outcome(duotone.scheme("minmax"))
    import math

    wanted = sum(math.log10(kl + 1e-5) for kl in found.kl.values()) / 2
    assert found.score == pytest.approx(wanted)
    assert set(found.kl) == {"one", "two"}
    assert len(found.parts) == 3
