"""`bench.serve` against a faked `vllm` on PATH."""

import sys

import pytest

from duotone.bench import serve
from duotone.report.tables import tables

FAKE = """#!{python}
import http.server, json, pathlib, sys
args = sys.argv[1:]
def value(name): return args[args.index(name) + 1]
with open({calls!r}, "a") as f: f.write(" ".join(args) + "\\n")
if args == ["--version"]:
    print("0.33.0")
elif args[0] == "bench":
    path = pathlib.Path(value("--result-dir")) / value("--result-filename")
    done = 2 if int(value("--seed")) < 9 else 1
    path.write_text(json.dumps(dict(completed=done, output_throughput=7.5, median_ttft_ms=3.0)))
elif value("--kv-cache-dtype") == "fp8":
    sys.exit("no such kernel")
else:
    print("GPU KV cache size: 12,345 tokens, Maximum", flush=True)
    class H(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_response(200); self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(value("--port"))), H).serve_forever()
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    calls, fake = tmp_path / "calls", tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(python=sys.executable, calls=str(calls)))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    return calls


def test_rows_reasons_and_a_resumed_run(calls, tmp_path):
    load = serve.Load("m", 10**9, 8, 4, 2, ("1", "inf"))
    path = tmp_path / "serve" / "m.json"
    first = serve.run(load, ["bf16", "fp8"], path, 20, print)["rows"]
    assert first[0]["cache_tokens"] == 12345
    assert [one["rate"] for one in first[0]["rates"]] == ["1", "inf"]
    assert first[0]["rates"][0]["tokens_per_s"] == 7.5
    assert first[1]["reason"] == "the server ended with 1\nno such kernel"
    seeds = [
        line.split("--seed ")[1][0] for line in calls.read_text().splitlines() if "bench" in line
    ]
    assert seeds == ["0", "1"]  # prompts of a rate are in no prefix cache yet
    table = tables(tmp_path / "serve")["serve"]
    assert "| bf16 | 12,345 | inf | 8 |" in table
    assert "*fp8*: the server ended with 1." in table
    calls.write_text("")
    again = serve.run(load, ["bf16", "duotone_2bit"], path, 20, print)["rows"]
    assert [row["row"] for row in again] == ["bf16", "duotone_2bit"]
    served = [line for line in calls.read_text().splitlines() if line.startswith("serve")]
    assert len(served) == 1
    assert served[0].endswith("duotone_2bit --attention-backend CUSTOM")
    assert "--kv-cache-memory-bytes 1000000000" in served[0]
    with pytest.raises(ValueError, match="one seed"):
        serve.run(serve.Load("m", 10**9, 8, 4, 2, ("1", "inf"), 1), ["bf16"], path, 20, print)


def test_requests_without_answers_are_a_reason(calls, tmp_path):
    load = serve.Load("m", 10**9, 8, 4, 2, ("inf",), seed=9)
    row = serve.run(load, ["bf16"], tmp_path / "m.json", 20, print)["rows"][0]
    assert row["reason"].startswith("all 2 requests must be answered; got 1 at rate inf")
