"""The zoo's data say what its pictures show, and every member takes them."""

from dataclasses import replace

import pytest
import torch

from training.zoo import tasks
from training.zoo.batches import Shape, make_batch
from training.zoo.glyphs import CELL, EMPTY, load_atlas
from training.zoo.members import _patches, feature_module, model_inputs
from training.zoo.rendering import Draw, render
from training.zoo.train import Trainee
from training.zoo.unseen import EVERY
from training.zoo.vocabulary import BOS, FIRST_GLYPH, IMAGE, PAD, VIDEO


def test_values_of_tables_stand_beside_their_keys() -> None:
    scene = tasks.table(Draw(1, "cpu"), 16, 8)
    asked = [turn for turn in scene.turns if turn[0] == "value"]
    assert len(asked) == 3
    for _, question, answer in asked:
        for cells, key, digits in zip(scene.cells, question[:, -1], answer, strict=True):
            (row,) = (cells[:, 0] == key - FIRST_GLYPH).nonzero().flatten().tolist()
            assert (cells[row, 2:5] + FIRST_GLYPH).tolist() == digits.tolist()


def test_heights_of_bars_are_those_asked_for() -> None:
    scene = tasks.chart(Draw(2, "cpu"), 16, 8)
    for _, question, answer in [turn for turn in scene.turns if turn[0] == "bar"]:
        for cells, key, digits in zip(scene.cells, question[:, -1], answer, strict=True):
            (column,) = (cells[-1] == key - FIRST_GLYPH).nonzero().flatten().tolist()
            halves = {EMPTY: 0, tasks.HALF: 1, tasks.FULL: 2}
            height = sum(halves[cell] for cell in cells[:-1, column].tolist())
            tens, units = (digits - FIRST_GLYPH).tolist()
            assert height == 10 * tens + units


def test_films_move_as_they_say() -> None:
    scenes, turns = tasks.film(Draw(3, "cpu"), 8, 6, 4)
    first, last = scenes[0].cells, scenes[-1].cells
    steps = torch.tensor([[-3, 0], [3, 0], [0, -3], [0, 3]])
    checked = 0
    for _, question, answer in [turn for turn in turns if turn[0] == "moves"]:
        shapes = question[:, -1] - tasks.ID["disc"] + tasks.FIRST_SHAPE
        for a, b, shape, move in zip(first, last, shapes, answer[:, 0], strict=True):
            places = (a == shape).nonzero(), (b == shape).nonzero()
            if all(len(place) == 1 for place in places):  # else another shape hides it
                moved = (places[1] - places[0])[0]
                assert torch.equal(moved, steps[move - tasks.ID["up"]])
                checked += 1
    assert checked > 12


def test_pictures_show_their_cells() -> None:
    atlas, draw = load_atlas("cpu"), Draw(4, "cpu")
    scene = tasks.table(draw, 8, 8)
    pixels = render(scene, atlas, draw)
    marks = (pixels - scene.background * 2 + 1).abs().mean(1).unfold(1, CELL, CELL)
    marks = marks.unfold(2, CELL, CELL).mean((3, 4))
    shown = scene.cells != EMPTY
    assert marks[shown].mean() > 3 * marks[~shown].mean()


def test_four_patches_in_a_row_are_a_cell() -> None:
    cells = torch.arange(16.0).view(4, 4)
    pixels = cells.repeat_interleave(CELL, 0).repeat_interleave(CELL, 1).expand(1, 2, 3, -1, -1)
    found = _patches(pixels, 2).unflatten(0, (16, 4))
    assert torch.equal(found, torch.arange(16.0).view(16, 1, 1).expand_as(found))


@pytest.mark.parametrize("name", EVERY)
def test_rows_have_all_visual_tokens_and_answers(name: str) -> None:
    for shape in (*EVERY[name].shapes, *EVERY[name].first):
        small = Shape(5, shape.length, shape.side, shape.pictures, shape.frames)
        batch = make_batch(Draw(5, "cpu"), small, load_atlas("cpu"))
        assert batch.ids.shape == (5, shape.length)
        assert (batch.ids[:, 0] == BOS).all()
        seen = ((batch.ids == IMAGE) | (batch.ids == VIDEO)).sum(1)
        assert (seen == shape.visual_tokens * max(shape.pictures, 0)).all()
        labels = batch.labels
        assert (labels != PAD).all()
        assert ((labels >= 0).sum(1) >= 4).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name != "deep"])
def test_every_member_takes_its_batches(name: str) -> None:
    member = EVERY[name]
    trainee = Trainee(member.build(), member.side)
    for shape in member.shapes:
        small = Shape(2, shape.length, shape.side, shape.pictures, shape.frames)
        batch = make_batch(Draw(6, "cpu"), small, load_atlas("cpu"))
        loss, sight = trainee(batch)
        assert 3 < loss < 8
        assert (sight > 3) == (batch.pixels is not None)
        assert "input_ids" in model_inputs(trainee.model, batch)


def test_features_have_the_dtype_of_embeddings_under_autocast() -> None:
    member = EVERY["smolvlm"]
    trainee, given = Trainee(member.build(), member.side), []
    module = feature_module(trainee.model)
    module.register_forward_hook(lambda module, args, output: given.append(output.dtype))
    small = replace(member.shapes[0], rows=1)
    batch = make_batch(Draw(6, "cpu"), small, load_atlas("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        losses = trainee(batch)
    assert all(torch.isfinite(x) and x > 3 for x in losses)
    assert given == [trainee.model.get_input_embeddings().weight.dtype]
