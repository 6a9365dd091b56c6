"""The zoo's tokens: a word or a character each, of four scripts."""

SPECIALS = ("<pad>", "<bos>", "<eos>", "<image>", "<video>", "<vision>", "</vision>")
ROLES = ("<user>", "<assistant>", "<space>")
DIGITS = "0123456789"
SCRIPTS = {
    "latin": "ABCDEFGHIJKLMNOPQRSTUVWX",
    "greek": "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ",
    "cyrillic": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШ",
    "georgian": "აბგდევზთიკლმნოპჟრსტუფქღყ",
}
LETTERS = 24
SHAPES = ("disc", "square", "triangle", "ring", "cross", "diamond")
COLOURS = {
    "red": (0.84, 0.15, 0.16),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.96, 0.9, 0.15),
    "green": (0.1, 0.6, 0.2),
    "blue": (0.12, 0.25, 0.85),
    "purple": (0.55, 0.15, 0.7),
    "white": (0.98, 0.98, 0.98),
    "black": (0.05, 0.05, 0.06),
}
TEXTURES = ("stripes", "waves", "checks", "dots", "blobs", "grain")
MOVES = ("up", "down", "left", "right")
ASKED = ("line", "at", "script", "value", "key", "largest", "count", "all", "bar", "highest")
ASKED += ("lowest", "more", "row", "texture", "direction", "colour", "moves", "frame", "page")
ASKED += ("nothing", "is", "read")

GLYPHS = (*DIGITS, *(f"{script}:{c}" for script, letters in SCRIPTS.items() for c in letters))
WORDS = (*SCRIPTS, *SHAPES, *COLOURS, *TEXTURES, *MOVES, *ASKED)
TOKENS = (*SPECIALS, *ROLES, *GLYPHS, *WORDS)
ID = {token: i for i, token in enumerate(TOKENS)}
PAD, BOS, EOS, IMAGE, VIDEO = range(5)
SPACE, FIRST_GLYPH = ID["<space>"], ID["0"]
VOCABULARY = 256
