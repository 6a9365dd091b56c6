"""The page's server with the embedded model, as a browser speaks to it."""

import http.client
import io
import json
import threading

import pytest
from PIL import Image

from duotone.demo import server as module
from duotone.demo.answers import Answers
from duotone.demo.choices import Choices
from duotone.demo.gallery import Gallery
from duotone.demo.server import Demo, DemoServer
from duotone.loading import load


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    loaded = load(None, "cpu")
    gallery = Gallery(tmp_path_factory.mktemp("pictures"))
    demo = Demo(Answers(loaded, 4), gallery, Choices(loaded), "calibquant", 1)
    with DemoServer(demo, "127.0.0.1", 0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(server, path, body=None, **headers):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=300)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def error_of(server, *request, status=400, **headers):
    found, _, body = ask(server, *request, **headers)
    assert found == status
    return json.loads(body)["error"]


def question(**changes):
    asked = {"entry": "document", "question": "Who is the seller?", "scheme": "duotone-klt"}
    return json.dumps(asked | {"bits": None, "later": True} | changes)


def test_serves_the_page_its_state_and_the_pictures(server):
    for path, kind in (("/", "html"), ("/style.css", "css"), ("/page.js", "javascript")):
        status, headers, body = ask(server, path)
        assert (status, kind in headers["Content-Type"]) == (200, True)
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert body
    state = json.loads(ask(server, "/state")[2])
    assert (state["model"], state["device"], state["embedded"]) == ("duotone-tiny", "cpu", True)
    assert (state["scheme"], state["bits"], state["can_ask_later"]) == ("calibquant", 1, True)
    assert 11e6 < state["parameters"] < 12e6
    for entry in state["entries"]:
        _, headers, body = ask(server, f"/picture/{entry['id']}/{entry['pictures'] - 1}")
        assert Image.open(io.BytesIO(body)).size == (256, 256)
        assert headers["Content-Type"] == "image/png"


def test_streams_both_answers_of_the_embedded_model(server):
    status, headers, body = ask(server, "/ask", question())
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson")
    events = [json.loads(line) for line in body.splitlines()]
    assert events[0] == {"event": "start", "tokens": 273, "visual_tokens": 256}
    ends = {event["side"]: event for event in events if event["event"] == "end"}
    assert [ends[side]["text"] for side in (0, 1)] == ["Arno Tre", "Arno Tre"]
    assert ends[1]["bytes"] * 4 < ends[0]["bytes"]
    assert events[-1]["same"] is True
    assert events[-1]["truth"] == ["Arno Trepeitri"]


def test_a_model_that_cannot_be_asked_later_is_asked_at_once(server, monkeypatch):
    for room in ("inference.batch", "demo.answers"):
        monkeypatch.setattr(f"duotone.{room}.EMBEDDABLE_FAMILIES", frozenset())
    events = [json.loads(line) for line in ask(server, "/ask", question())[2].splitlines()]
    assert [event["event"] for event in (events[0], events[-1])] == ["start", "done"]


def test_answers_about_a_picture_that_was_sent_or_drawn(server):
    data = io.BytesIO()
    Image.new("RGB", (40, 30), "navy").save(data, "JPEG")
    sent = json.loads(ask(server, "/picture?name=my%20wall.jpg", data.getvalue())[2])
    assert (sent["name"], sent["pictures"]) == ("my wall.jpg", 1)
    drawn = json.loads(ask(server, "/draw", json.dumps({"kind": "scene"}))[2])
    for entry in (sent, drawn):
        lines = ask(server, "/ask", question(entry=entry["id"]))[2].splitlines()
        assert json.loads(lines[-1])["event"] == "done"


def test_refuses_bad_requests_with_a_sentence(server, monkeypatch):
    assert "image file" in error_of(server, "/picture?name=a.png", b"words")
    assert "a question must" in error_of(server, "/ask", question(question=""))
    assert "the scheme must" in error_of(server, "/ask", question(scheme="x"))
    assert "takes" in error_of(server, "/ask", question(scheme="kivi", bits=5))
    assert "JSON object" in error_of(server, "/ask", "[]")
    assert error_of(server, "/ask", "{")
    assert "drawn of" in error_of(server, "/draw", "{}")
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    assert "a picture must have at most" in error_of(server, "/picture?name=a.png", b"x" * 5000)
    long = error_of(server, "/ask", question(question="x" * 200_000))
    assert long == "a request must have at most 0.1 MB, got 0.2 MB; make it smaller"
    for path in ("/etc/passwd", "/picture/scene/9", "/picture/scene/x", "/page/../server.py"):
        error_of(server, path, status=404)
    assert "Content-Length" in error_of(server, "/draw", "{}", Content_Length="many")


def test_other_sites_and_other_names_of_this_machine_are_refused(server):
    port = server.server_address[1]
    for wrong in (
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Host": f"example.org:{port}"},
        {"Host": f"example.org:{port}", "Origin": f"http://example.org:{port}"},
    ):
        assert "only pages of this server" in error_of(server, "/state", status=403, **wrong)
        error_of(server, "/ask", question(), status=403, **wrong)
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert ask(server, "/state", **own)[0] == 200


def test_an_error_in_the_middle_is_an_event(server, monkeypatch):
    def broken(self, asked):
        yield {"event": "start"}
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(Demo, "ask", broken)
    lines = ask(server, "/ask", question())[2].splitlines()
    assert json.loads(lines[-1]) == {"event": "error", "message": "out of luck"}


def test_an_error_at_the_beginning_has_words(server, monkeypatch):
    def broken(self, asked):
        yield from ()
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(Demo, "ask", broken)
    assert error_of(server, "/ask", question(), status=500) == "out of memory"


def test_a_taken_address_is_an_error(server):
    with pytest.raises(OSError, match="in use"):
        DemoServer(server.demo, *server.server_address)
