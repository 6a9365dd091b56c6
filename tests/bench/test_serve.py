"""`bench.serve` against a faked `vllm` on PATH."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cli_runs import error_of, run

from duotone.bench import serve
from duotone.report.serve import serve_summary
from duotone.report.tables import tables

FAKE = """#!{python}
import http.server, json, pathlib, sys, time
args = sys.argv[1:]
def value(name): return args[args.index(name) + 1]
with open({calls!r}, "a") as f: f.write(" ".join(args) + "\\n")
if args == ["--version"]:
    print("0.33.0")
elif args[0] == "bench":
    path = pathlib.Path(value("--result-dir")) / value("--result-filename")
    done = int(value("--num-prompts")) if int(value("--seed")) < 9 else 1
    time.sleep({wait})
    found = dict(completed=done, output_throughput=7.5, median_ttft_ms=3.0)
    if done == 1 and "--save-detailed" in args:
        found["errors"] = ["", "Traceback\\n ...\\nServerDisconnectedError: gone\\n"]
    path.write_text(json.dumps(found))
elif value("--kv-cache-dtype") == "fp8":
    sys.exit("no such kernel")
else:
    print("GPU KV cache size: 12,345 tokens, Maximum")
    print("Using AttentionBackendEnum.FLASH_ATTN backend.")
    print("Using backend AttentionBackendEnum.TORCH_SDPA for vit attention", flush=True)
    class H(http.server.BaseHTTPRequestHandler):
        asked = 0
        def do_GET(self):
            self.send_response(200); self.end_headers()
            if self.path == "/metrics":
                H.asked += 1
                running = 5 if H.asked == 2 else 3
                self.wfile.write(b'vllm:num_requests_running{{engine="0"}} %d.0\\n' % running)
    http.server.HTTPServer(("127.0.0.1", int(value("--port"))), H).serve_forever()
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    calls, fake = tmp_path / "calls", tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(python=sys.executable, calls=str(calls), wait=0.1))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    return calls


def test_rows_reasons_and_a_resumed_run(calls, tmp_path):
    load = serve.Load("m", 10**9, 8, 4, 2, ("1", "inf"))
    path = tmp_path / "serve" / "m.json"
    first = serve.run(load, ["bf16", "fp8"], path, 20, print)["rows"]
    assert first[0]["cache_tokens"] == 12345
    assert first[0]["backends"] == ["FLASH_ATTN"]
    assert [one["rate"] for one in first[0]["rates"]] == ["1", "inf"]
    assert first[0]["rates"][0]["tokens_per_s"] == 7.5
    assert first[1]["reason"] == "the server ended with 1\nno such kernel"
    seeds = [
        line.split("--seed ")[1][0] for line in calls.read_text().splitlines() if "bench" in line
    ]
    assert seeds == ["0", "1"]  # prompts of a rate are in no prefix cache yet
    table = tables(tmp_path / "serve")["serve"]
    assert "| bf16 | FLASH_ATTN | 12,345 | inf | 2 | 8 |" in table
    assert "*fp8*: the server ended with 1." in table
    calls.write_text("")
    again = serve.run(load, ["bf16", "duotone_2bit"], path, 20, print)["rows"]
    assert [row["row"] for row in again] == ["bf16", "duotone_2bit"]
    served = [line for line in calls.read_text().splitlines() if line.startswith("serve")]
    assert len(served) == 1
    assert served[0].endswith("duotone_2bit --attention-backend CUSTOM")
    assert "--kv-cache-memory-bytes 1000000000" in served[0]
    assert "--max-model-len 76 " in served[0]
    given = serve.Load("m", 10**9, 8, 4, 2, ("inf",), server_options=("--load-format", "dummy"))
    serve.run(given, ["bf16"], tmp_path / "dummy.json", 20, print)
    served = [line for line in calls.read_text().splitlines() if line.startswith("serve")]
    assert "--load-format dummy --kv-cache-dtype auto" in served[-1]
    with pytest.raises(ValueError, match="one seed"):
        serve.run(serve.Load("m", 10**9, 8, 4, 2, ("1", "inf"), 1), ["bf16"], path, 20, print)


def test_a_reason_has_the_first_error_and_the_last_lines():
    before = [f"line {n}" for n in range(40)]
    log = ["WARNING limits lead to `OSError`", *before, "ValueError: 72 heads", *before]
    found = serve._telling(log)
    assert found[0] == "ValueError: 72 heads"
    assert found[1:] == [*before[: serve.LOG_LINES - 1], *before[-serve.LOG_LINES :]]
    assert serve._telling(log[:3]) == log[:3]
    assert serve._telling([*log[:41], "ValueError: 72 heads", "end"])[-1] == "end"


def test_requests_without_answers_are_a_reason(calls, tmp_path):
    load = serve.Load("m", 10**9, 8, 4, 2, ("inf",), seed=9)
    row = serve.run(load, ["bf16"], tmp_path / "m.json", 20, print)["rows"][0]
    said = "all 2 requests must be answered; got 1 at rate inf; 1 x ServerDisconnectedError: gone"
    assert row["reason"].startswith(said)


def test_waves_are_as_many_requests_as_the_cache_holds(calls, tmp_path):
    load = serve.Load("m", 10**9, 4000, 1000, None, ("inf",), waves=3)
    row = serve.run(load, ["bf16"], tmp_path / "m.json", 20, print)["rows"][0]
    assert "--num-prompts 6 " in calls.read_text()
    assert row["rates"][0]["completed"] == 6  # 12,345 tokens hold 2
    assert "3 times the requests that a row's cache holds" in tables(tmp_path)["serve"]
    longer = serve.Load("m", 10**9, 40000, 1000, None, ("inf",), waves=3)
    assert longer.requests(12345) == 3
    with pytest.raises(serve.RowError, match="does not say"):
        longer.requests(None)


@pytest.mark.parametrize("given", [{"prompts": None}, {"prompts": 2, "waves": 1}])
def test_a_load_has_prompts_or_waves(given):
    with pytest.raises(ValueError, match="either prompts or waves"):
        serve.Load("m", 10**9, 8, 4, rates=("inf",), **given)


def test_most_at_once_is_the_servers_own_number(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    load = serve.Load("m", 10**9, 8, 4, 2, ("inf",))
    row = serve.run(load, ["bf16"], tmp_path / "m.json", 20, print)["rows"][0]
    assert row["rates"][0]["most_running"] == 5


def test_the_command_writes_rows_and_fails_with_a_reason(calls, tmp_path):
    path = tmp_path / "m.json"
    options = ("--cache", "1GB", "--prompts", "2", "--rates", "inf", "--out", str(path))
    assert (
        run("bench", "serve", "m", *options, "--row", "bf16", "--max-model-len", "99").exit_code
        == 0
    )
    assert json.loads(path.read_text())["rows"][0]["row"] == "bf16"
    assert "--max-model-len 99 " in calls.read_text()
    found = run("bench", "serve", "m", *options, "--row", "fp8", "--max-model-len", "99")
    assert found.exit_code == 1
    assert "--row must be one of" in error_of("bench", "serve", "m", *options, "--row", "int3")


def test_sigterm_ends_the_server(calls, tmp_path):
    code = (
        "from duotone.bench.serve import _server, Load; import pathlib, time\n"
        f"load, log = Load('m', 1, 8, 4, 2, ('inf',)), pathlib.Path({str(tmp_path / 'log')!r})\n"
        "with _server(load, ['--kv-cache-dtype', 'auto'], log, 20):\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with bench:
        assert bench.stdout.readline() == "up\n"
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(20) == 128 + signal.SIGTERM
    served = calls.read_text().split("--port ")[1].split()[0]
    end = time.monotonic() + 10
    while any(served in line for line in open_commands()):
        assert time.monotonic() < end
        time.sleep(0.05)


def open_commands():
    """Command lines of processes that run now."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                yield file.read().decode(errors="replace")
        except OSError:
            continue


def test_the_summary_compares_loads_that_come_at_once():
    def row(name, speed, at="inf"):
        slow = {"rate": "1", "tokens_per_s": 1e6}
        return {"row": name, "rates": [slow, {"rate": at, "tokens_per_s": speed}]}

    stamp = {"cache_bytes": 3e10, "input_tokens": 4096, "device": "a GPU"}
    both = {**stamp, "rows": [row("bf16", 100), row("duotone_2bit", 250)]}
    three = {**stamp, "rows": [*both["rows"], row("fp8", 125)]}
    rates = {**stamp, "rows": [row("bf16", 100, "4"), row("duotone_2bit", 250, "4")]}
    one = {**stamp, "rows": [row("bf16", 100), {"row": "duotone_2bit", "reason": "no such kernel"}]}
    head = "With 30 GB of cache, and prompts of 4,096 tokens, a server on 2 bits gives 2.50 times "
    assert serve_summary([both, one, rates, three]).splitlines() == [
        f"{head}the tokens of 16 bit (a GPU).",
        f"{head}the tokens of 16 bit and 2.00 times FP8's (a GPU).",
    ]
