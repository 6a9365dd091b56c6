"""Host time of lone attention calls, of their parts, and of decode steps of a 28-layer model.

    PYTHONPATH=src:tests:tests/attention/helpers python dev/measure/host_time.py

About 2 minutes on an H100, with nothing else on the host. Prints one line per row. Times of calls: us, 200 calls without a wait, median [least] of 5.
"""

import argparse
import gc
import statistics
import sys
import warnings
from itertools import pairwise
from time import perf_counter

import torch
import torch.nn.functional as F
from launch_cases import records_of

import duotone
from duotone.attention import decode_attention
from duotone.attention.cuda import kept_call
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.segments import DenseSegment
from duotone.quant import TensorSpec

from cases import CALIBRATED, Case

CALLS, REPEATS = 200, 5
ON_GPU = torch.cuda.is_available()
KIVI = {"key": TensorSpec(2, "tokens", 32), "value": TensorSpec(1, "channels", 32)}


def wait():
    if ON_GPU:
        torch.cuda.synchronize()


def timed(name, call):
    """call: takes the number of the call."""
    for number in range(20):
        call(number)
    found = []
    for _ in range(REPEATS):
        wait()
        begin = perf_counter()
        for number in range(CALLS):
            call(number)
        found.append((perf_counter() - begin) / CALLS * 1e6)
        wait()
    print(f"{name:58} {statistics.median(found):7.1f} [{min(found):.1f}]", flush=True)


def calls(batch):
    shape = {"head_dim": 128, "kv_heads": 8, "dtype": torch.bfloat16}
    lengths, window = (3328,) * batch, (100,) * batch
    kinds = {
        "spans": (Case(lengths, **shape, dense=window), span_layout, None),
        "spans, calibrated": (Case(lengths, **shape, dense=window), span_layout, (0.0, 3.0)),
        "classes": (Case(lengths, *CALIBRATED, **shape, dense=window), class_layout, None),
        "groups": (Case(lengths, **KIVI, **shape, dense=window), GroupLayout(), None),
    }
    for kind, (case, layout, tau) in kinds.items():
        query, kv = records_of(case, layout)
        given = {"sm_scale": case.sm_scale, "tau": tau}

        def attend(segments, given=given, query=query):
            return decode_attention(query, segments, **given)

        def anew(segments, attend=attend):
            kept_call._kept().clear()
            attend(segments)

        packed, dense = kv
        steps = [[packed, moved(dense)] for _ in range(20)]
        name = f"batch {batch}, {kind}"
        timed(f"{name} alone", lambda n: attend([packed]))
        timed(f"{name} + window", lambda n: attend(kv))
        timed(f"{name} + window, new tensors at each call", lambda n: attend(steps[n % 20]))
        timed(f"{name} alone, planned anew", lambda n: anew([packed]))
        timed(f"{name} + window, planned anew", lambda n: anew(kv))
        if kind == "spans":
            timed(
                f"batch {batch}, window only (no CUDA kernel takes it)", lambda n: attend([dense])
            )
            if ON_GPU:
                parts(batch, query, kv, attend)
    query = torch.randn(batch, 32, 1, 128, device=query.device, dtype=query.dtype)
    key, value = (query.new_empty(batch, 8, 3428, 128).normal_() for _ in range(2))
    timed(
        f"batch {batch}, scaled_dot_product_attention",
        lambda n: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
    )


def moved(dense):
    """The window in tensors of another size, as after a step."""
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (dense.key, dense.value))
    return DenseSegment(key, value, dense.lengths.clone())


def parts(batch, query, kv, attend):
    """Time the parts of a kept call of spans and a window."""
    attend(kv)
    call = kept_call._kept()[id(kv[0].records)][1]
    made, out = call.launched.made, torch.empty_like(query)
    name = f"  batch {batch}, of that:"
    print(f"{name} launches: {[launch.kernel.__class__.__name__ for launch in made]}")
    timed(f"{name} find what is kept", lambda n: kept_call.kept_call(query, kv, *settings(call)))
    fields = call.fields(query, kv)
    timed(f"{name} make it again", lambda n: call(query, kv, fields))
    timed(f"{name} allocate the result", lambda n: torch.empty_like(query))
    timed(f"{name} allocate room", lambda n: call.launched.room.allocate(out))
    device = query.device
    stream = torch.cuda.current_stream(device).cuda_stream
    # All of them, or tickets would stay in the counters; addresses are the last call's.
    attend(kv)
    timed(f"{name} all launches", lambda n: [launch(stream) for launch in made])
    timed(f"{name} torch's stream object", lambda n: torch.cuda.current_stream(device).cuda_stream)
    timed(f"{name} stream handle", lambda n: torch._C._cuda_getCurrentRawStream(device.index))


def settings(call):
    """sm_scale and tau of a kept call."""
    return call.settings[3:5]


def steps(tokens, new):
    """Wall time of a step of `generate`; the model is so narrow that a GPU waits for the host."""
    from duotone.bench.generate import _unending
    from duotone.bench.generate_watch import Watch
    from duotone.inference import random_models

    language = {
        **random_models._QWEN,
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    random_models.SHAPES["narrow"] = (language, random_models._SMALL_TOWER, 112)
    device = torch.device("cuda" if ON_GPU else "cpu")
    model = random_models.random_model("narrow", device, torch.bfloat16)
    inputs, mask = random_models.marked_prompt(model, 1, tokens)

    def ran(name):
        found = []
        for _ in range(4):
            gc.collect()
            watch = Watch(device, lambda: False)
            model.generate(**inputs, max_new_tokens=new, do_sample=False, stopping_criteria=[watch])
            found.append([1e3 * (b - a) for a, b in pairwise(watch.times_s)])
        medians = [statistics.median(one) for one in found[1:]]
        worst = max(max(one) for one in found[1:])
        median = statistics.median(medians)
        print(f"{name:58} {median:7.2f} [{min(medians):.2f}], longest {worst:.1f} ms", flush=True)
        return median

    with _unending(model), torch.no_grad():
        plain = ran("28 layers, ms per step: plain")
        for scheme in ("duotone@1", "kivi@2", "innerq@2"):
            name, _, bits = scheme.partition("@")
            spec = duotone.scheme(name, bits=int(bits))
            with duotone.enable(model, spec, visual_mask=mask, graphs=False):
                more = ran(f"28 layers, ms per step: {scheme}, graphs=False") - plain
            print(f"    {more:+.2f} ms beside plain (at most 4)")
        again = ran("28 layers, ms per step: plain again")
        print(f"    plain moved by {again - plain:+.2f} ms")


def main():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    asked.add_argument("--tokens", type=int, default=3328)
    asked.add_argument("--new", type=int, default=96)
    asked.add_argument("--only", choices=["calls", "steps"])
    given = asked.parse_args()
    warnings.simplefilter("default")
    name = torch.cuda.get_device_name() if ON_GPU else "CPU, the reference"
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if given.only != "steps":
        for batch in given.batches:
            calls(batch)
    if given.only != "calls":
        steps(given.tokens, given.new)


if __name__ == "__main__":
    main()
