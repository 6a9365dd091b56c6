"""Table and page of reports of weights and caches under one memory (schema duotone.joint/1)."""

from duotone.report.markdown import Result, markdown_table, source

HEADER = ("weights", "GB", "true bits left", "KL, 16-bit cache", "cache", "KL", "GB in all")


def joint_rows(report: Result) -> list[list[str]]:
    """A row per recipe: bytes, bits for caches, divergence of the weights alone and of the pair."""
    kept = report["kept"]["weights"]
    return [_cells(row, row["recipe"] == kept) for row in report["rows"]]


def _cells(row: Result, is_kept: bool) -> list[str]:
    name = f"**{row['recipe']}**" if is_kept else row["recipe"]
    if row["why"]:
        return [name, _gigabytes(row["weights_bytes"]), "", "", f"none: {row['why']}", "", ""]
    return [
        name,
        _gigabytes(row["weights_bytes"]),
        "16-bit fits" if row["is_dense"] else f"{row['bits']:.2f}",
        f"{row['weights_kl']:.3g}",
        row["cache"],
        f"{row['kl']:.3g}",
        _gigabytes(row["bytes"]),
    ]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.4g}"


def joint_page(report: Result) -> str:
    """The page of one search over pairs."""
    memory, usual = report["memory"], report["memory"]["usual"]
    tokens = sum(usual[f"{kind}_tokens"] for kind in ("visual", "text", "new"))
    load = (
        f"{memory['sequences']:,} sequences of {tokens:,} tokens in "
        f"{_gigabytes(memory['memory_bytes'])} GB, of which {_gigabytes(memory['reserve_bytes'])} "
        "GB stay free."
    )
    sections = [
        f"# Weights and caches: {report['settings']['model']['name']}",
        load,
        "\n".join(report["sentences"]),
        markdown_table(list(HEADER), joint_rows(report)),
        "KL is from 16-bit weights with a 16-bit cache, on held-out samples; the kept row is bold.",
        f"*{source(report)}.*",
    ]
    return "\n\n".join(sections) + "\n"
