import io

import pytest
from PIL import Image

from duotone.demo import gallery as module
from duotone.demo.entries import KINDS
from duotone.demo.gallery import Gallery
from duotone.tasks.synthetic.documents import TRANSCRIPT_QUESTION


@pytest.fixture
def gallery(tmp_path):
    return Gallery(tmp_path)


def png(size=(32, 32), mode="RGB", form="PNG"):
    data = io.BytesIO()
    Image.effect_noise(size, 90).convert(mode).save(data, form)
    return data.getvalue()


def test_begins_with_the_bundled_pictures_their_questions_and_right_answers(gallery):
    assert [entry["id"] for entry in gallery.to_list()] == ["scene", "document", "frames"]
    prompt, truth = gallery.prompt("document", " Who is the seller? ")
    assert (prompt.question, truth) == ("Who is the seller?", ("Arno Trepeitri",))
    assert gallery.prompt("document", "Why?")[1] == ()
    assert gallery.file("frames", 3).name == "frame4.png"


@pytest.mark.parametrize("kind", KINDS)
def test_draws_pictures_with_questions_and_answers(gallery, kind):
    drawn = gallery.draw(kind)
    assert drawn["pictures"] == (4 if kind == "frames" else 1)
    assert TRANSCRIPT_QUESTION not in drawn["questions"]
    prompt, truth = gallery.prompt(drawn["id"], drawn["questions"][0])
    for file in prompt.images:
        with Image.open(file) as image:
            assert image.size == (256, 256)
    assert truth
    assert gallery.draw(kind)["id"] != drawn["id"]


def test_keeps_a_picture_of_the_user_as_8_bits_without_its_path(gallery):
    added = gallery.add("C:\\me\\<b>cat.jpg", png(mode="L", form="JPEG"))
    assert added["name"] == "_b_cat.jpg"
    with Image.open(gallery.file(added["id"], 0)) as image:
        assert (image.mode, image.format) == ("RGB", "PNG")
    assert [path.suffix for path in gallery.folder.iterdir()] == [".png"]


def test_the_oldest_of_many_pictures_goes_and_the_bundled_ones_stay(gallery, monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 2)
    added = [gallery.add("a.png", png((8, 8 + i)))["id"] for i in range(3)]
    kept = [entry["id"] for entry in gallery.to_list()]
    assert kept == ["scene", "document", "frames", *added[1:]]
    assert len(list(gallery.folder.iterdir())) == 2


def refused(gallery, data):
    with pytest.raises(ValueError, match=r"a picture must") as error:
        gallery.add("notes.txt", data)
    assert str(gallery.folder) not in str(error.value)
    assert not list(gallery.folder.iterdir())
    return str(error.value)


def test_refuses_what_is_no_picture_or_too_large(gallery, monkeypatch):
    assert "an image file that Pillow reads" in refused(gallery, b"words")
    assert "'notes.txt'" in refused(gallery, b"words")
    assert "an image file" in refused(gallery, png()[:200])
    monkeypatch.setattr(module, "MOST_PIXELS", 1000)
    assert "got 32 x 32" in refused(gallery, png())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    assert "pixels" in refused(gallery, png())
    monkeypatch.setattr(module, "MOST_BYTES", 3)
    assert "0 MB" in refused(gallery, b"four")


@pytest.mark.parametrize("question", [None, " ", 3, "x" * 1001])
def test_refuses_a_question_that_is_none(gallery, question):
    with pytest.raises(ValueError, match="a question must"):
        gallery.prompt("scene", question)


def test_refuses_unknown_entries(gallery):
    for wrong in (
        lambda: gallery.prompt("sc", "Why?"),
        lambda: gallery.prompt(["scene"], "Why?"),
        lambda: gallery.file("scene", 1),
        lambda: gallery.file("scene", -1),
        lambda: gallery.draw("cat"),
        lambda: gallery.draw(None),
    ):
        with pytest.raises(ValueError, match="got"):
            wrong()
