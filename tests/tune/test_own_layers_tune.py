"""`duotone tune` of models whose layers keep states or pictures."""

import json
from pathlib import Path

import pytest
import torch
from cli_runs import run
from hybrid_commands import FolderOf, GridProcessor, folder_of
from PIL import Image
from shrunk import tiny_config, tiny_model_of
from shrunk_pictures import with_picture

import duotone
from duotone.hf.model.facts import model_facts
from duotone.hf.recommended import Usual
from duotone.inference.encoded import EncodedPrompts
from duotone.joint.shares import Load, usual_of
from duotone.loading import Loaded
from duotone.tasks import get_task
from duotone.tune import TuneSettings, make_job, make_report
from duotone.tune.answered import Answered
from duotone.tune.batches import ready
from duotone.tune.objective import measure

from families import new_model, tiny_model

pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated")
__all__ = ["folder_of"]  # a fixture


def text_of(count: int, letters: int) -> EncodedPrompts:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 250, (count, letters), generator=draw)
    none = torch.zeros(letters, dtype=torch.bool)
    return EncodedPrompts("mine", tuple({"input_ids": x, "visual_mask": none} for x in ids), 9)


def few_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Few specs that a search begins with."""
    few = {f"{name} @2": duotone.scheme(name, bits=2) for name in names}
    monkeypatch.setattr("duotone.tune.run.known_specs", lambda *_, **__: few)
    monkeypatch.setattr("duotone.tune.run.seed_points", lambda space: [])


def rows_of(folder: Path, count: int = 4) -> Path:
    lines = []
    for number in range(count):
        Image.new("RGB", (20, 20), (60 * number, 100, 10)).save(folder / f"{number}.png")
        row = {"question": f"what is number {number} ?", "answers": ["red"]}
        lines.append(json.dumps(row | {"images": [f"{number}.png"]}))
    (folder / "mine.jsonl").write_text("\n".join(lines))
    return folder / "mine.jsonl"


@pytest.mark.parametrize("name", ["qwen3_next", "mllama"])
def test_streams_are_found_within_a_budget_of_k_and_v(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_of(monkeypatch, "kivi", "duotone-stream")
    model = tiny_model_of(name) if name == "mllama" else new_model(name)
    settings = TuneSettings(budget_bits=20.0, samples=2, heldout=2, batch_size=2)
    job = make_job(Loaded(name, model, None), [text_of(4, 301)], settings, tmp_path / "out")
    tuned = job.search(trials=2)
    assert len(tuned.sensitivity.key) == model_facts(model).layers
    report = make_report(job, tuned, scores=False)
    assert report["heldout"]["chosen"]["bits"] <= 20.0
    assert report["heldout"]["chosen"]["packed"] > 0.2
    assert (tuned.of, report["later_question"]) == ("cache", False)


def test_states_are_no_part_of_the_bits() -> None:
    model = tiny_model("qwen3_next")
    facts, (encoded,) = model_facts(model), text_of(2, 21).batches(2, 2)
    batch = ready(model, encoded, 4)
    assert isinstance(batch, Answered)
    found = measure(model, batch, duotone.scheme("dense"), of="cache").held
    states = 8 * 2 * facts.state_bytes / found.elements
    assert 32 < found.bits < 32 + states / 4  # spare slots and the index


def test_from_pictures_to_a_spec_by_the_command(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_of(monkeypatch, "minmax", "duotone")
    out, rows = tmp_path / "tuned", rows_of(tmp_path)
    asked = ("tune", rows, "--model", folder_of("qwen3_5"), "--out", out, "-n", 2, "--heldout", 2)
    asked += ("--batch-size", 2, "--device", "cpu", "-b", 14, "--trials", 1, "--no-plot")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["heldout"]["chosen"]["bits"] <= 14
    assert "chosen" in report["scores"]["mine"]["schemes"]
    assert not report["later_question"]
    spec = duotone.CacheSpec.from_file(out / "spec.json")
    assert spec == duotone.CacheSpec.from_dict(report["specs"][report["verdict"]["kept"]])


def test_a_pictured_task_is_not_asked_later_where_prompts_are_read_whole(tmp_path: Path) -> None:
    loaded = Loaded("qwen3_5", tiny_model("qwen3_5"), GridProcessor())
    settings = TuneSettings(budget_bits=14.0, samples=2, heldout=2, batch_size=2)
    task = get_task(str(rows_of(tmp_path)))
    job = make_job(loaded, [task], settings, tmp_path / "out")
    (batches,) = job.prefilled(job.encoded, "16-bit answers").values()
    assert job.counts.all_pictured
    assert isinstance(batches[0], Answered)
    assert not job.later_question


def test_memory_of_a_card_is_left_to_states_first() -> None:
    facts = model_facts(tiny_model("qwen3_next"))
    usual, spec = Usual(0, 90, 10), duotone.scheme("kivi", bits=2)
    load = Load(facts, 3, usual)
    share = load.share("none", 0, load.caches_bytes(spec))
    planned = load.plan(spec)
    assert planned.states_bytes > 0
    grown = planned.bytes_per_sequence - planned.states_bytes
    assert share.bits == pytest.approx(8 * grown / (100 * facts.elements))
    assert share.bits == pytest.approx(planned.bits_per_element)
    assert load.share("none", 0, 3 * planned.states_bytes).why
    unknown = Load(model_facts(tiny_config("qwen4_exp")), 3, usual)
    with pytest.raises(ValueError, match=r"needs the bytes of whole caches; got states of"):
        unknown.share("none", 0, 10**9)


def test_pictures_next_to_the_tokens_are_those_of_the_samples() -> None:
    model = tiny_model_of("mllama")
    given = with_picture(model, 20)
    alone = {name: given[name] for name in ("input_ids", "attention_mask")}
    usual = usual_of([given, alone], model.config, 8, 200)
    assert (usual.visual_tokens, usual.images, usual.tokens) == (0, 1, 200)
    assert usual_of([alone], model.config, 8, 200).images == 0
    planned = Load(model_facts(model), 1, usual).plan(duotone.scheme("kivi"))
    assert planned.pictures_bytes == model_facts(model).picture_bytes > 0
