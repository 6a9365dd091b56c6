"""Pairs of weights and caches under one memory, on a random model of three layers."""

import json
from dataclasses import replace

import pytest

import duotone
from duotone.joint import JointSettings, make_joint, make_report, write_report
from duotone.joint.report import divergence
from duotone.joint.run import SIXTEEN
from duotone.planning.card import weight_bytes
from duotone.tune.run import OutOfReachError
from duotone.tune.seeds import known_specs
from tiny_vlm import TINY_TASK, tiny_model

from mquant_setups import tiny_loaded

pytest.importorskip("optuna")

TOKENS, SEQUENCES = 40, 50


# K and V of a token at this model's own width.
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4


def settings_of(bits: float, sequences: int = SEQUENCES, **changes) -> JointSettings:
    """Settings that leave 16-bit weights so many true bits for caches."""
    caches = int(bits / 8 * TOKEN_BYTES / 4 * TOKENS * sequences)
    memory = weight_bytes(tiny_model()) + caches
    given = {"reserve_bytes": 0, "samples": 2, "heldout": 6, "batch_size": 3} | changes
    return JointSettings(memory, sequences, TOKENS, **given)


def joint_of(tmp_path, settings):
    return make_joint(tiny_loaded, [TINY_TASK], settings, tmp_path / "out")


def few_known(facts, *, has_pictures):
    names = ("minmax @2", "minmax @4", "duotone @1", "kivi @2")
    every = known_specs(facts, has_pictures=has_pictures)
    return {name: every[name] for name in names}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint")
    settings = settings_of(14.0, weights=("none", "rtn-w8a8", "rtn-w4a8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duotone.tune.run.known_specs", few_known)
        joint = make_joint(tiny_loaded, [TINY_TASK], settings, folder / "out")
        pairs = joint.search(trials=2)
        yield joint, pairs, make_report(joint, pairs)


def test_weights_of_fewer_bytes_leave_more_bits_for_caches(searched):
    joint, pairs, report = searched
    bits = {share.recipe: share.bits for share in joint.shares}
    assert bits["none"] == pytest.approx(14.0, rel=1e-3)
    assert bits["none"] < bits["rtn-w8a8"] < bits["rtn-w4a8"]
    assert {pair.share.recipe for pair in pairs} == set(bits)
    for row in report["rows"]:
        assert row["bytes"] <= joint.settings.memory_bytes
        assert row["weights_bytes"] == weight_bytes(tiny_model(), row["recipe"])


def test_the_reference_is_the_16_bit_model(searched):
    """Weights alone cost what they cost, and 16-bit weights with 16-bit caches cost nothing."""
    _, pairs, report = searched
    alone = {row["recipe"]: row["weights_kl"] for row in report["rows"]}
    assert alone["none"] < 1e-4
    assert alone["none"] < alone["rtn-w8a8"] < alone["rtn-w4a8"]
    assert all(pair.rows[SIXTEEN]["tiny"].rows[:, 2].sum() > 0 for pair in pairs)


def test_the_kept_pair_is_never_worse_than_the_best_preset(searched):
    joint, pairs, report = searched
    kept, preset = report["kept"], report["best_preset"]
    assert kept["kl"] <= preset["kl"] * (1 + 1e-9)
    assert kept["kl"] == min(divergence(pair) for pair in pairs)
    files = {file.name: file for file in write_report(report, joint.out)}
    spec = duotone.CacheSpec.from_file(files["spec.json"])
    assert spec == duotone.CacheSpec.from_dict(kept["spec"])
    assert json.loads(files["report.json"].read_text()) == json.loads(json.dumps(report))
    page = files["report.md"].read_text()
    assert f"| **{kept['weights']}** |" in page
    assert report["sentences"][0] in page
    assert " % of the tokens of these caches" in page


def test_a_search_goes_on_with_the_weights_that_it_has(searched, monkeypatch):
    joint, pairs, report = searched
    monkeypatch.setattr("duotone.joint.models.quantize_model", None)
    again = make_joint(tiny_loaded, [TINY_TASK], joint.settings, joint.out)
    more = again.search(trials=2)
    assert [pair.trials for pair in more] == [pair.trials for pair in pairs]
    assert make_report(again, more)["rows"] == report["rows"]
    with pytest.raises(ValueError, match="tokens: 40 -> 41"):
        make_joint(tiny_loaded, [TINY_TASK], replace(joint.settings, tokens=41), joint.out)


def test_caches_that_fit_in_16_bit_are_not_searched(tmp_path):
    memory = weight_bytes(tiny_model(), "rtn-w8a8") + TOKEN_BYTES * TOKENS * SEQUENCES
    given = {"reserve_bytes": 0, "samples": 2, "heldout": 6, "batch_size": 3}
    settings = JointSettings(memory, SEQUENCES, TOKENS, weights=("rtn-w8a8",), **given)
    joint = joint_of(tmp_path, settings)
    (pair,) = joint.search(trials=0)
    assert (pair.label, pair.end, pair.share.is_dense) == (SIXTEEN, None, True)
    report = make_report(joint, [pair])
    assert report["kept"]["bytes"] == memory
    assert report["kept"]["folder"].endswith("rtn-w8a8/weights")
    assert report["best_preset"]["cache"] == SIXTEEN


def test_specs_that_do_not_fit_at_the_length_asked_for_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.tune.run.known_specs", known_specs)
    joint = joint_of(tmp_path, settings_of(20.0, weights=("none",)))
    share = joint.shares[0]
    job = joint._job(share, tiny_loaded(), tmp_path / "x", joint.started)
    every = known_specs(job.facts, has_pictures=True)
    fitting = {k for k, v in every.items() if joint.load.caches_bytes(v) <= share.caches_bytes}
    assert set(job.known) == fitting
    assert "minmax @2" in fitting
    assert "kivi @2" not in fitting
    monkeypatch.setattr("duotone.tune.run.known_specs", few_known)
    monkeypatch.setattr("duotone.tune.run.seed_points", lambda space: [])
    job.takes = lambda spec: spec == every["minmax @2"]
    assert job.search(trials=0).chosen.spec == every["minmax @2"]
    job.takes = lambda spec: False
    with pytest.raises(OutOfReachError, match="no spec within"):
        job.search(trials=0)


def test_a_sequence_has_the_proportions_of_the_samples(tmp_path):
    joint = joint_of(tmp_path, settings_of(14.0, weights=("none",)))
    assert joint.load.usual.tokens == TOKENS
    longer = joint_of(tmp_path / "longer", replace(joint.settings, tokens=50 * TOKENS))
    usual = longer.load.usual
    assert usual.tokens == 50 * TOKENS
    assert usual.new_tokens == round(5 * 2 / (3 * 16 + 2 * 5 + 16) * 50 * TOKENS)
    # Two prompts with three pictures of 16 tokens, two of which lie side by side.
    assert usual.images == round(usual.visual_tokens / 24)


def test_recipes_without_room_are_left_out_with_the_reason(tmp_path):
    """Weights as they are leave too little, others enough for 16-bit caches."""
    joint = joint_of(tmp_path, settings_of(9.0, sequences=12, weights=("none", "rtn-w8a8")))
    assert [share.is_dense for share in joint.shares] == [False, True]
    pairs = joint.search(trials=1)
    assert [pair.share.recipe for pair in pairs] == ["rtn-w8a8"]
    why = {share.recipe: share.why for share in joint.shares}
    assert "smallest caches take" in why["none"]
    report = make_report(joint, pairs)
    write_report(report, joint.out)
    assert "none: the budget must be within reach" in (joint.out / "report.md").read_text()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be"),
        ({"sequences": 0}, "sequences must be"),
        ({"weights": ()}, "at least one"),
        ({"weights": ("none", "none")}, "different recipes"),
        ({"weights": ("rtn",)}, "did you mean"),
        ({"sampler": "grid"}, "sampler must be"),
    ],
)
def test_settings_that_say_nothing_are_refused(changes, rule):
    with pytest.raises(ValueError, match=rule):
        replace(JointSettings(10**9, 1, 100), **changes)


def test_memory_below_all_weights_is_refused_before_any_work(tmp_path):
    settings = JointSettings(10**4, 1, 100, samples=2, heldout=2, batch_size=2)
    with pytest.raises(ValueError, match="leave memory for caches; none: its weights leave no"):
        joint_of(tmp_path, settings)
    assert not (tmp_path / "out").exists()
