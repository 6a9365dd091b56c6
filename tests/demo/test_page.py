"""The page in a headless browser, with the embedded model."""

import io
import threading

import pytest
from PIL import Image

from duotone.demo.answers import Answers
from duotone.demo.choices import Choices
from duotone.demo.gallery import Gallery
from duotone.demo.server import Demo, DemoServer
from duotone.loading import load

import browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.executable() is None, reason="needs a Chromium"),
]
TEXT = "document.querySelector('#side-{} .text').textContent"
ANSWERED = "document.body.dataset.state === 'answered'"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    loaded = load(None, "cpu")
    gallery = Gallery(tmp_path_factory.mktemp("pictures"))
    demo = Demo(Answers(loaded, 16), gallery, Choices(loaded), "calibquant")
    with DemoServer(demo, "127.0.0.1", 0) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with browser.tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(server, opened):
    opened.size(1280, 900)
    opened.open(server.url)
    opened.wait_for("document.body?.dataset.state === 'ready'")
    opened.errors.clear()
    return opened


def click(page, selector, number=0):
    page.value(f"document.querySelectorAll({selector!r})[{number}].click()")


def ask(page, question):
    page.value(f"document.getElementById('question').value = {question!r}")
    click(page, "#ask")
    assert page.value("document.body.dataset.state") == "asking"
    page.wait_for(ANSWERED)


def test_two_answers_stand_side_by_side_with_bytes_and_bars(page):
    assert "11.5 million parameters" in page.value("document.body.innerText")
    click(page, "#entries button", 1)
    ask(page, "Who is the seller?")
    assert page.value(TEXT.format(0)) == "Arno Trepeitri"
    assert page.value(TEXT.format(1)).strip() == "Lotte Sten"
    assert page.value("document.querySelectorAll('#side-1 mark').length") == 2
    assert "x smaller" in page.value("document.getElementById('verdict').textContent")
    width = "parseFloat(document.querySelector('#side-{} .memory i').style.width)"
    assert page.value(width.format(0)) == 100
    assert page.value(width.format(1)) < 30
    assert page.errors == []


def test_a_scheme_can_be_chosen_and_a_suggestion_asks(page):
    page.value("document.getElementById('scheme').value = 'duotone-klt'")
    page.value("document.getElementById('scheme').dispatchEvent(new Event('change'))")
    assert page.value("document.querySelector('#side-1 h2').textContent") == "duotone-klt"
    assert page.value("document.getElementById('bits').disabled")
    click(page, "#suggestions button", 1)
    page.wait_for(ANSWERED)
    assert "the same answer" in page.value("document.getElementById('verdict').textContent")


def test_a_second_question_takes_the_place_of_the_first(page):
    click(page, "#ask")
    ask(page, "What colour is the house?")
    assert page.value(TEXT.format(0)) == "purple"
    assert page.errors == []


def test_a_cache_that_is_not_smaller_says_so(page):
    page.value("document.getElementById('scheme').value = 'dense'")
    page.value("document.getElementById('scheme').dispatchEvent(new Event('change'))")
    ask(page, "What colour is the house?")
    assert "is not smaller" in page.value("document.getElementById('verdict').textContent")


def test_pictures_can_be_drawn_and_sent_and_what_is_none_is_refused(page):
    count = "document.querySelectorAll('#entries button').length"
    before = page.value(count)
    click(page, "[data-kind=scene]")
    page.wait_for(f"{count} === {before + 1}")
    data = io.BytesIO()
    Image.new("RGB", (40, 30), "navy").save(data, "PNG")
    content = f"new Uint8Array({list(data.getvalue())})"
    page.value(f"upload(new File([{content}], 'wall.png'))")
    page.wait_for(f"{count} === {before + 2}")
    assert page.value("!document.getElementById('foreign').hidden")
    page.value("upload(new File(['words'], 'words.png'))")
    page.wait_for("document.getElementById('verdict').className === 'failed'")
    assert "an image file" in page.value("document.getElementById('verdict').textContent")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_view(page, width, dark):
    page.size(width, 800, dark)
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
    light = page.value("getComputedStyle(document.body).color")
    assert (light == "rgb(29, 33, 41)") is not dark
