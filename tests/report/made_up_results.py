"""Made-up results of the quality table."""

HEADER = {
    "schema": "duotone.quality/1",
    "created": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "versions": {"torch": "2.13.0", "python": "3.11"},
    "device": "NVIDIA H200",
}


def interval(value, half_width=0.01):
    return {"value": value, "low": value - half_width, "high": value + half_width}


def scheme(value, bits):
    return {
        "metrics": {"anls": interval(value), "kl": interval(2 * value)},
        "memory": {"bits_per_element": 16.0, "visual_bits_per_element": bits},
    }


def result(task="documents"):
    taus = [(a, b) for a in (0, 1) for b in (0, 1)]
    grid = {f"paper-1 tau {a},{b}": {"anls": interval(0.5 + a - b / 4)} for a, b in taus}
    reference = scheme(0.9, 16.0)
    del reference["metrics"]["kl"]
    return HEADER | {
        "task": task,
        "headline": "anls",
        "samples": 500,
        "later_question": task == "captions",
        "tau_grid": {"samples": 200, "chosen": {"paper-1": [1, 0]}, "metrics": grid},
        "schemes": {
            "16-bit": reference,
            "good @1": scheme(0.89, 1.125),
            "bad|worse @1": scheme(0.45, 1.12),
        },
        "differences": {
            "good @1 - 16-bit": {"anls": interval(-0.01, 0.02)},
            "bad|worse @1 - 16-bit": {"anls": interval(-0.45, 0.02)},
        },
    }
