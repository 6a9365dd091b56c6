"""Drawings of docs/concepts.md, as SVG: python dev/site/drawings.py writes them to docs/img.

They lie on a light panel of their own, so that both grounds of the site suit them.
"""

from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "docs" / "img"
VISUAL, TEXT, NEW, INK, FAINT, PANEL = (
    "#5c6bc0",
    "#90a4ae",
    "#ff7043",
    "#263238",
    "#cfd8dc",
    "#f7f8fb",
)
# Fills by bits of a channel: 16, 4, 2, 1 and none.
BITS = {16: "#263238", 4: "#3949ab", 2: "#7986cb", 1: "#c5cae9", 0: "#ffffff"}


def box(x: float, y: float, w: float, h: float, fill: str, more: str = "") -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="2" fill="{fill}" {more}/>'


def words(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {more}>{text}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = INK) -> str:
    """A line that ends in an arrow."""
    return (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def drawing(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole drawing."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{INK}"><title>{title}</title>'
        f"<defs>{tip}</defs>"
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="{PANEL}"/>'
    return "\n".join([head, ground, *parts, "</svg>\n"])


def kv_cache() -> str:
    """One decode step: the query of the newest token meets K and V of all others."""
    kinds, parts = [TEXT] * 2 + [VISUAL] * 12 + [TEXT] * 4, []
    for row, name in enumerate(("layer 1", "layer 2", "...", "layer 28")):
        y = 70 + 46 * row
        parts.append(words(72, y + 22, name, "end"))
        if name == "...":
            continue
        for column, kind in enumerate(kinds):
            x = 86 + 24 * column
            parts += [box(x, y, 20, 15, kind), box(x, y + 17, 20, 15, kind, 'opacity="0.6"')]
        parts.append(box(552, y + 6, 24, 20, NEW))
        parts += [words(564, y + 21, "q", "middle", 'fill="#fff"'), arrow(550, y + 16, 522, y + 16)]
    parts += [
        words(86, 30, "tokens so far, K above V in every layer"),
        words(564, 30, "new", "middle"),
    ]
    parts += [words(564, 46, "token", "middle")]
    for x, fill, name in ((86, VISUAL, "of the picture"), (216, TEXT, "of text")):
        parts += [box(x, 44, 12, 12, fill), words(x + 18, 54, name)]
    parts.append(words(86, 268, "A step reads every box once; then the new token has boxes, too."))
    return drawing(620, 286, "What a KV cache is", parts)


def visual_tokens() -> str:
    """A picture becomes a run of tokens within the prompt."""
    shades = (
        "#b3e5fc",
        "#81d4fa",
        "#a5d6a7",
        "#66bb6a",
        "#ffe082",
        "#ffca28",
        "#bcaaa4",
        "#8d6e63",
    )
    parts = [words(90, 28, "a tile of 448 x 448 pixels", "middle")]
    for n in range(16):
        row, column = divmod(n, 4)
        shade = shades[2 * row + (column in (1, 2))]
        parts.append(box(20 + 36 * column, 40 + 36 * row, 34, 34, shade))
    parts += [arrow(172, 112, 236, 112), words(204, 102, "vision", "middle")]
    parts += [words(204, 132, "tower", "middle"), words(204, 148, "+ projector", "middle")]
    for n in range(16):
        row, column = divmod(n, 4)
        parts.append(box(250 + 22 * column, 70 + 22 * row, 18, 18, VISUAL))
    parts += [words(292, 182, "256 tokens", "middle"), arrow(348, 112, 392, 112)]
    row = [TEXT] * 2 + [VISUAL] * 9 + [TEXT] * 3
    for n, kind in enumerate(row):
        parts.append(box(402 + 15 * n, 96, 12, 32, kind))
    parts += [
        words(402, 86, "the prompt"),
        words(402, 148, "text"),
        words(484, 148, "the picture", "middle"),
    ]
    parts += [words(570, 148, "the question", "middle")]
    parts.append(
        words(20, 214, "A page of 13 tiles is 3,328 tokens; its question has some twenty.")
    )
    return drawing(640, 232, "What visual tokens are", parts)


def bits() -> str:
    """The parts of a cache by bits, and the channels of one picture."""
    parts, x = [words(20, 26, "the cache of one conversation")], 20
    for width, fill, ink, name in (
        (44, BITS[16], "#fff", "16"),
        (250, BITS[2], INK, "2 bit, a span per picture"),
        (170, BITS[4], "#fff", "4 bit, groups of 32"),
        (116, BITS[16], "#fff", "16 bit"),
    ):
        parts += [
            box(x, 38, width, 34, fill),
            words(x + width / 2, 60, name, "middle", f'fill="{ink}"'),
        ]
        x += width + 6
    for at, name in (
        (42, "first"),
        (195, "pictures"),
        (405, "text, answers"),
        (554, "latest tokens"),
    ):
        parts.append(words(at, 90, name, "middle"))
    dashes = f'stroke="{INK}" stroke-dasharray="3 3"'
    parts += [f'<line x1="70" y1="98" x2="20" y2="132" {dashes}/>']
    parts += [f'<line x1="320" y1="98" x2="404" y2="132" {dashes}/>']
    widths = (4, 2, 1, 2, 2, 0, 1, 2)
    for row, width in enumerate(widths):
        y = 136 + 20 * row
        edge = f'stroke="{FAINT}"'
        parts += [box(20 + 24 * n, y, 22, 17, BITS[width], edge) for n in range(16)]
        parts += [
            box(414, y, 22, 17, NEW),
            words(452, y + 14, f"{width} bit" if width else "no code"),
        ]
    parts += [words(20, 316, "codes: channels down, tokens across"), words(414, 316, "scale, mean")]
    parts += [
        words(530, 160, "wide codes"),
        words(530, 178, "where channels"),
        words(530, 196, "vary most"),
    ]
    return drawing(640, 334, "Where bits go", parts)


DRAWINGS = {"kv-cache.svg": kv_cache, "visual-tokens.svg": visual_tokens, "bits.svg": bits}


def main() -> None:
    """Write all drawings."""
    for name, draw in DRAWINGS.items():
        (OUT / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
