"""Tables of `conversation.py` and `conversation_bytes.py`."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.quality.zoo_bounds import of_unseen, of_zoo
from duotone.report.markdown import Result, markdown_table, source

KIVI, TYPICAL = "kivi@2, released", 1.96
PUBLISHED = "kivi@2, published"  # its bytes
PARTS = {"kl": "KL", "kl_pictures": "KL, about pictures", "kl_text": "KL, about text"}


def talk_table(results: Sequence[Result]) -> str:
    """KL and bytes of every scheme, a table per model and length."""
    tables = [_model_table(result) for result in sorted(results, key=lambda r: r["model"])]
    legend = (
        "KL: nats per answer token ± half the 95 % interval over conversations. Bold: not above "
        "KIVI's beyond the interval of paired differences. Bytes: of `cache.memory()` over those "
        "that KIVI's code takes by its published windows, at the end and as means over all steps."
    )
    return "\n\n".join([*tables, legend, f"*{source(*_runs(results))}.*"])


def _runs(results: Sequence[Result]) -> list[Result]:
    """Results, and their rows of other commits, which were measured later."""
    later = [
        {**result, **{name: row[name] for name in ("commit", "created", "device")}}
        for result in results
        for row in result["rows"]
        if "commit" in row
    ]
    return [*results, *later]


def difference(
    ours: Result, theirs: Result, part: str, tokens: Sequence[int]
) -> tuple[float, float]:
    """KL of a row less that of another, and half of its interval, over pairs of conversations."""
    pairs = zip(ours[f"{part}_sums"], theirs[f"{part}_sums"], strict=True)
    found, count = [a - b for a, b in pairs], sum(tokens)
    mean = sum(found) / count
    errors = (x - mean * n for x, n in zip(found, tokens, strict=True))
    return mean, TYPICAL * math.sqrt(sum(x * x for x in errors)) / count


def _model_table(result: Result) -> str:
    plain, *others = result["rows"]
    rows = [row for row in others if "failed" not in row]
    kivi = next(row for row in rows if row["row"] == KIVI)
    sizes = result["sizes"]
    wide = [f"{sizes['16 bit'][of] / sizes[PUBLISHED][of]:.2f}" for of in ("bytes", "bytes_mean")]
    lines = [["16 bit", "", "", "", f"{plain['accuracy']:.3f}", *wide]]
    for row in rows:
        cells = [_kl(row, kivi, part, plain) for part in PARTS]
        bytes_ = (f"{row[of] / sizes[PUBLISHED][of]:.2f}" for of in ("bytes", "bytes_mean"))
        lines.append([row["row"], *cells, f"{row['accuracy']:.3f}", *bytes_])
    beyond = "" if result["parts"] == 1 else ", more than it was trained on"
    title = (
        f"{result['model']}, {result['conversations']} conversations of {result['length']} "
        f"tokens{beyond}, {result['visual_tokens']} of them visual:"
    )
    header = ["scheme", *PARTS.values(), "accuracy", "bytes at the end / KIVI's", "mean"]
    return f"{title}\n\n{markdown_table(header, lines)}"


def _kl(row: dict[str, Any], kivi: dict[str, Any], part: str, plain: dict[str, Any]) -> str:
    text = f"{row[part]:.2g} ± {row[f'{part}_interval']:.1g}"
    mean, half = difference(row, kivi, part, plain[f"tokens{part[2:]}"])
    return f"**{text}**" if mean <= half and row is not kivi else text


def bytes_table(results: Sequence[Result]) -> str:
    """Bytes of a conversation over those of KIVI's code, by its pictures and its text."""
    result = results[-1]
    names = list(result["talks"][0]["bytes"])
    header = ["visual tokens", "pictures", "text tokens", *names]
    lines = [
        [
            *(f"{talk[of]:,}" for of in ("visual_tokens", "pictures", "text_tokens")),
            *(f"{talk['bytes'][name] / talk['kivi_bytes']:.2f}" for name in names),
        ]
        for talk in result["talks"]
    ]
    return f"{markdown_table(header, lines)}\n\n*{result['shape']}; {source(result)}.*"


RENDERERS = {
    "talk": ("duotone.conversation/1", lambda results: talk_table(of_zoo(results))),
    "unseen-talk": ("duotone.conversation/1", lambda results: talk_table(of_unseen(results))),
    "talk-bytes": ("duotone.conversation-bytes/1", bytes_table),
}
