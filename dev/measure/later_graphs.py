"""Replays of a process's first graph beside later ones, and of one graph that is instantiated again.

    PYTHONPATH=src python dev/measure/later_graphs.py kivi@2,duotone@1,duotone@1 [--free]

Blocks of `enable` in turn, batch 1 of internvl3-8b's shape. Times are from an event before a launch
to one after it.
"""

import statistics as st
import sys

import torch

import duotone
import duotone.tools.cuda_graph as cg
from duotone.bench.generate import _unending
from duotone.bench.generate_watch import Watch
from duotone.inference import random_models as made

plain_replay = cg.CudaGraph.replay
events, held = [], []


def replay(self):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    plain_replay(self)
    b.record()
    events.append((a, b))
    held.append(self)


cg.CudaGraph.replay = replay
driver = cg._driver()


def capture(self, body, stream):
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    cg._checked(driver.cuStreamBeginCapture(stream, mode))
    result = body()
    self.template = cg._checked(driver.cuStreamEndCapture(stream))
    self._graph = cg._checked(driver.cuGraphInstantiate(self.template, 0))
    return result


cg._Held.capture = capture
device = torch.device("cuda")
model = made.random_model("internvl3-8b", device, torch.bfloat16)
given = made.random_prompt("internvl3-8b", model, 1, 3428)


def timed(execs, n=3, stream=None):
    out = []
    for e in execs:
        t = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s = stream or torch.cuda.current_stream()
            torch.cuda.synchronize()
            a.record(s)
            cg._checked(driver.cuGraphLaunch(e, s.cuda_stream))
            b.record(s)
            torch.cuda.synchronize()
            t.append(a.elapsed_time(b))
        out.append(round(st.median(t), 3))
    return out


order = sys.argv[1].split(",")
with _unending(model):
    for turn, name in enumerate(order):
        base, bits = name.split("@")
        with duotone.enable(model, duotone.scheme(base, bits=int(bits))) as s:
            for _ in range(2):
                events.clear()
                model.generate(
                    **given,
                    max_new_tokens=100,
                    do_sample=False,
                    stopping_criteria=[Watch(device, lambda: False)],
                )
                torch.cuda.synchronize()
            g = [a.elapsed_time(b) for a, b in events[20:]]
            print(turn, name, f"replay {st.median(g):.3f}", flush=True)
            if turn in (0, 1):
                one = held[-1]._held
                again = cg._checked(driver.cuGraphInstantiate(one.template, 0))
                third = cg._checked(driver.cuGraphInstantiate(one.template, 0))
                cg._checked(driver.cuGraphUpload(third, torch.cuda.current_stream().cuda_stream))
                print(
                    "   the same, again, again and uploaded:",
                    timed([one._graph, again, third]),
                    "in another stream:",
                    timed([one._graph, again], stream=torch.cuda.Stream()),
                    flush=True,
                )
        if "--free" in sys.argv:
            s.free_graphs()
