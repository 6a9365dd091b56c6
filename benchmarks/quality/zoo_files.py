"""Files of `zoo.py` as cases: rows that were measured later stand beside those of before.

Files of one model, stress and seed have the same batches, maybe not as many. Rows are cut to the
sequences that all of these files have; of rows with one name the newest counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.quality.zoo import ratio

File = Mapping[str, Any]
# Fields of a row that are of all its sequences.
OF_ALL = ("accuracy",)


def cases_of(files: Sequence[File]) -> list[dict[str, Any]]:
    """A result per model, stress and seed, as they come, with the newest file's header.

    Errors: ValueError for files of one case with other answers.
    """
    found: dict[tuple[Any, ...], list[File]] = {}
    for file in files:
        found.setdefault((file["model"], file["stress"], file.get("seed")), []).append(file)
    groups = (sorted(group, key=lambda file: file["created"]) for group in found.values())
    return [_merged(group) if len(group) > 1 else dict(group[0]) for group in groups]


def newest(files: Sequence[File]) -> list[dict[str, Any]]:
    """`cases_of`, of every model and stress the newest; by model."""
    by_age = sorted(cases_of(files), key=lambda case: case["created"])
    found = {(case["model"], case["stress"]): case for case in by_age}
    return [found[key] for key in sorted(found)]


def _merged(group: Sequence[File]) -> dict[str, Any]:
    counts = min((file["rows"][0]["tokens"] for file in group), key=len)
    rows: dict[str, Any] = {}
    for file in group:
        plain, *others = file["rows"]
        if plain["tokens"][: len(counts)] != counts:
            case = f"{file['model']}, {file['stress']}, of {file['created']}"
            raise ValueError(f"files of a case must have the same answers; got others for {case}")
        is_cut = len(plain["tokens"]) > len(counts)
        rows |= {row["row"]: _cut(row, counts) if is_cut else row for row in others}
    plain = {**group[0]["rows"][0], "tokens": counts}
    return {**group[-1], "sequences": len(counts), "rows": [plain, *rows.values()]}


def _cut(row: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """Row of the first sequences, as many as there are counts."""
    if "failed" in row:
        return dict(row)
    sums = row["kl_sums"][: len(counts)]
    kl, interval = ratio(torch.tensor(sums).double(), torch.tensor(counts))
    kept = {name: value for name, value in row.items() if name not in OF_ALL}
    return kept | {"kl": kl, "kl_interval": interval, "kl_sums": sums}
