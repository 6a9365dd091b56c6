"""A result of `duotone bench kernel` with made-up numbers, for tables."""

from dataclasses import asdict

from duotone.bench.schemes import bench_schemes
from duotone.bench.shapes import SHAPES
from duotone.bench.speedups import with_speedups

HEADER = {
    "schema": "duotone.kernels/1",
    "created": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "versions": {"torch": "2.11.0", "python": "3.12"},
    "device": "MADE UP H200",
    "method": "",
    "minutes": None,
    "repeats": 50,
    "copy_tb_per_s": 4.0,
}


def _row(shape, name, impl, kind, nbytes, us):
    return {
        "shape": asdict(shape),
        "row": name,
        "impl": impl,
        "kind": kind,
        "nominal_bits": 1,
        "tau": False,
        "status": "ok",
        "us": {"do_bench": us * 1.2, "clean": us * 1.1, "rotated": us},
        "buffers": 8,
        "bytes": {"codes": 0, "params": 0, "dense": 0, "total": nbytes},
        "first_use_s": 1.5,
        "check": {"rms": 0, "max": 0},
    }


def rows_of_shape(shape):
    numbers = shape.batch * shape.kv_heads * shape.tokens * shape.head_dim * 2
    yield _row(shape, "sdpa cudnn", None, "16-bit", numbers * 2, numbers * 2 / 4.2e6)
    yield _row(shape, "two matmuls", None, "16-bit", numbers * 2, numbers * 2 / 3e6)
    missing = {"status": "unavailable", "reason": "no such backend"}
    yield _row(shape, "sdpa flash", None, "16-bit", 0, 1) | missing
    for scheme in bench_schemes():
        if scheme.reason(shape):
            continue
        used = int(numbers * (scheme.bits / 8 + (0.25 if scheme.key.group else 0.002)))
        for impl, speed in (("cuda", 3.5e6), ("triton", 1e6)):
            if impl == "triton" or scheme.key.group is None:
                us = used / speed + 4
                yield _row(shape, scheme.name, impl, "packed", used, us)


def made_up():
    rows = [row for shape in SHAPES for row in rows_of_shape(shape)]
    shapes = [asdict(shape) for shape in SHAPES]
    numbers = with_speedups(rows, HEADER["copy_tb_per_s"])
    return HEADER | {"shapes": shapes, "rows": numbers, "pack": PACKED}


def packed_row(name, us):
    times = {"do_bench": us, "clean": us, "rotated": us}
    over_copy = {method: time / 100 for method, time in times.items()}
    shape = {"batch": 8, "q_heads": 32, "kv_heads": 8, "tokens": 8192, "head_dim": 128}
    sizes = {"read_bytes": 1 << 28, "written_bytes": 1 << 25}
    return {"shape": shape, "row": name, **sizes, "us": times, "over_copy": over_copy}


PACKED = {
    "status": "ok",
    "rows": [
        packed_row(*row)
        for row in (("copy", 100.0), ("innerq-2 symmetric", 120.0), ("innerq-2 hybrid", 150.0))
    ],
    "stopped": None,
}
