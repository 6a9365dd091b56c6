"""What a decode kernel is compiled with."""

import ctypes

# Bytes of a block's rings without bulk copies.
RINGS = {"sm_80": 144 << 10, "sm_86": 80 << 10}


def common(form, group, warps, arguments) -> dict[str, int]:
    return {
        "CHANNELS": form.head_dim,
        "G": group,
        "WARPS": warps,
        "PER_SM": 1,
        "STAGES": form.stages,
        "OVERLAP": 1,
        "QUERY": 1,
        "OUT": 1,
        "PAGED": 0,
        "MERGE": 1,
        "ARGUMENTS_BYTES": ctypes.sizeof(arguments),
    }
