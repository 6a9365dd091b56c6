"""A search's checks and its choice, on random models of two and three layers."""

import json

import pytest
import torch

import duotone
from duotone.inference.encoded import EncodedPrompts, TextFile
from duotone.loading import Loaded
from duotone.tasks import get_task
from duotone.tune import TuneSettings, make_job, make_report, write_report
from duotone.tune.answered import Answered
from tiny_text import LetterTokenizer, text_model

pytest.importorskip("optuna")


def text_task(tmp_path, letters, rows=8):
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(97, 123, (rows, letters), generator=draw).tolist()
    file = tmp_path / "words.jsonl"
    lines = [json.dumps({"question": "".join(map(chr, t)), "answers": ["x"]}) for t in texts]
    file.write_text("\n".join(lines))
    return get_task(str(file))


def job_of(tmp_path, letters, budget, samples=2):
    loaded = Loaded("words", text_model().bfloat16(), LetterTokenizer())
    settings = TuneSettings(budget_bits=budget, samples=samples, heldout=2, batch_size=2)
    return make_job(loaded, [text_task(tmp_path, letters)], settings, tmp_path / "out")


def test_a_budget_is_within_reach_where_short_groups_reach_it(tmp_path):
    """Groups of 256 pack nothing of so short prompts; groups of 32 do."""
    assert job_of(tmp_path, 222, 5.0).budget_bits == 5.0
    with pytest.raises(ValueError, match=r"smallest caches take [1-4]\.\d\d true bits"):
        job_of(tmp_path, 222, 1.0)


def test_codes_that_were_never_read_are_no_choice(tmp_path):
    """Some specs within 17 bits pack nothing, and are as near to 16 bit as can be."""
    job = job_of(tmp_path, 60, 17.0)
    tuned = job.search(trials=2)
    assert tuned.chosen.outcome.packed > 0
    assert not tuned.chosen.outcome.unproved
    assert all(not tried.outcome.unproved for tried in tuned.tried)


def test_without_any_codes_that_were_read_the_search_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.tune.run.seed_points", lambda space: [])
    monkeypatch.setattr(
        "duotone.tune.run.known_specs", lambda *_, **__: {"kivi @2": duotone.scheme("kivi")}
    )
    job = job_of(tmp_path, 20, 20.0)
    with pytest.raises(ValueError, match="whose codes were ever read: no token of its text codes"):
        job.search(trials=0)


def test_a_preset_takes_the_place_of_a_worse_choice(tmp_path, monkeypatch):
    """The choice is made the worst of all tried specs; KIVI at 4 bits is nearer and fits."""
    job = job_of(tmp_path, 400, 9.5)
    tuned = job.search(trials=0)
    within = [t for t in tuned.tried if t.outcome.bits <= 9.5]
    tuned.chosen = max(within, key=lambda tried: tried.outcome.score)
    report = make_report(job, tuned, scores=False)
    kept = report["verdict"]["kept"]
    assert kept != "chosen"
    assert report["verdict"]["kl_ratio"]["value"] > 1
    files = {f.name: f for f in write_report(report, job.out, plot=False)}
    spec = duotone.CacheSpec.from_file(files["spec.json"])
    assert spec == duotone.CacheSpec.from_dict(report["specs"][kept])
    assert duotone.CacheSpec.from_file(files["found.json"]) == tuned.chosen.spec
    assert "takes its place" in files["report.md"].read_text()
    asked = make_report(job, tuned, scores=False, keep_found=True)
    assert asked["verdict"]["kept"] == "chosen"
    names = {f.name for f in write_report(asked, job.out, plot=False)}
    assert "found.json" not in names
    assert not (job.out / "found.json").exists()


def job_on(tmp_path, task, budget, **settings):
    loaded = Loaded("words", text_model().bfloat16(), LetterTokenizer())
    sizes = {"samples": 2, "heldout": 2, "batch_size": 2}
    return make_job(
        loaded, [task], TuneSettings(budget_bits=budget, **sizes, **settings), tmp_path / "out"
    )


def test_a_text_model_is_tuned_on_visual_embeddings(tmp_path):
    prompts = []
    for seed in range(4):
        x = 0.4 * torch.randn(80, 32, generator=torch.Generator().manual_seed(seed))
        prompts.append({"inputs_embeds": x, "visual_mask": (torch.arange(80) % 80) < 64})
    job = job_on(tmp_path, EncodedPrompts("embeds", tuple(prompts), 5), 3.0)
    assert (job.of, job.counts.visual, job.counts.all_pictured) == ("visual", 64, True)
    tuned = job.search(trials=2)
    report = make_report(job, tuned)
    assert report["verdict"]["found"]["packed"] > 0.5
    assert report["scores"] == {}
    assert report["settings"]["tasks"][0]["heldout_samples"] == 2


def test_a_text_file_is_tuned_on(tmp_path):
    draw = torch.randint(0, 26, (1300,), generator=torch.Generator().manual_seed(0))
    text = "".join(chr(97 + int(i)) for i in draw)
    job = job_on(tmp_path, TextFile("story", text, context=300), 9.0)
    assert (job.of, job.counts.text) == ("cache", 300)
    assert job.search(trials=1).chosen.outcome.packed > 0.3


def test_a_family_that_cannot_read_on_is_measured_token_by_token(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.tune.batches.can_prefill", lambda *_: False)
    job = job_of(tmp_path, 150, 16.0)
    batches = job.prefilled(job.encoded, "16-bit answers")
    assert isinstance(batches["words"][0], Answered)
    outcome = job.meter(batches).outcome(duotone.scheme("kivi").replace(recent=32))
    assert outcome.packed > 0.5
    assert not outcome.unproved
