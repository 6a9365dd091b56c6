"""Four frames in which objects move, appear, vanish and change colour, with short questions.

Every answer needs a particular frame or a comparison of frames. Every kind of question has many
answers of similar frequency, so that guessing from the question alone fails.
"""

from dataclasses import dataclass
from random import Random

from PIL import Image

from duotone.tasks.synthetic.drawing import (
    COLOURS,
    SHAPES,
    SIZE,
    STYLES,
    TONES,
    add_noise,
    background,
    draw_shape,
    jitter,
)
from duotone.tasks.synthetic.sample import Mark, Sample, Turn
from duotone.tasks.synthetic.scenes import is_clear_place, place_name

FRAMES = 4
DIRECTIONS = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "up left": (-1, -1),
    "up right": (1, -1),
    "down left": (-1, 1),
    "down right": (1, 1),
    "it stays": (0, 0),
}


@dataclass(frozen=True)
class Track:
    """One object through the frames; frames count from zero, `last` is included."""

    shape: str
    colours: tuple[str, ...]
    direction: str
    radius: int
    places: tuple[tuple[int, int], ...]
    first: int
    last: int

    def is_visible(self, frame: int) -> bool:
        """True if the object is in a frame."""
        return self.first <= frame <= self.last

    @property
    def change(self) -> int | None:
        """The frame in which the object takes its new colour; None if the colour stays."""
        return next((i for i in range(1, FRAMES) if self.colours[i] != self.colours[i - 1]), None)


def _random_colours(rng: Random) -> tuple[str, ...]:
    """Return a colour per frame; half of the objects change theirs once."""
    old, new = rng.sample(tuple(COLOURS), 2)
    change = rng.randint(1, FRAMES - 1) if rng.random() < 0.5 else FRAMES
    return tuple(old if i < change else new for i in range(FRAMES))


def _random_span(rng: Random) -> tuple[int, int]:
    """Return first and last frame: always there, appearing later, or vanishing early."""
    event = rng.random()
    if event < 0.4:
        return 0, FRAMES - 1
    if event < 0.7:
        return rng.randint(1, FRAMES - 1), FRAMES - 1
    return 0, rng.randint(0, FRAMES - 2)


def _random_track(rng: Random) -> Track:
    direction = rng.choice(tuple(DIRECTIONS))
    step, radius = rng.randint(24, 44), rng.randint(17, 28)
    travel = [step * d for d in DIRECTIONS[direction]]
    start = []
    for distance in travel:
        reach = distance * (FRAMES - 1)
        low, high = radius + 2 + max(0, -reach), SIZE - radius - 3 - max(0, reach)
        start.append(rng.randint(low, high))
    places = tuple((start[0] + i * travel[0], start[1] + i * travel[1]) for i in range(FRAMES))
    span = _random_span(rng)
    return Track(rng.choice(SHAPES), _random_colours(rng), direction, radius, places, *span)


def _fits(track: Track, others: list[Track]) -> bool:
    """True if no two objects share a shape and none overlap in any frame."""
    for other in others:
        gap = track.radius + other.radius + 3
        pairs = zip(track.places, other.places, strict=True)
        if track.shape == other.shape:
            return False
        if any((a - c) ** 2 + (b - d) ** 2 < gap**2 for (a, b), (c, d) in pairs):
            return False
    return True


def _random_tracks(rng: Random) -> list[Track]:
    """Draw three to five objects; a crowded sequence may end up with fewer, never under two."""
    wanted = rng.randint(3, 5)
    tracks: list[Track] = []
    for attempt in range(200):
        track = _random_track(rng)
        if _fits(track, tracks):
            tracks.append(track)
        if len(tracks) == wanted or (attempt > 60 and len(tracks) > 1):
            break
    return tracks


def _motion_turns(track: Track) -> list[Turn]:
    """Make questions about an object's path, if seen in two frames, and its position in a frame."""
    turns = []
    if track.last > track.first:
        turns.append(Turn(f"Which way moves the {track.shape}?", (track.direction,), "direction"))
    for i in range(track.first, track.last + 1):
        if is_clear_place(*track.places[i]):
            question = f"Where is the {track.shape} in frame {i + 1}?"
            turns.append(Turn(question, (place_name(*track.places[i]),), "place"))
    return turns


def _colour_turns(track: Track) -> list[Turn]:
    """Ask for the colour in each frame, and for the change if both colours are seen."""
    shape, change = track.shape, track.change
    turns = [
        Turn(f"What colour is the {shape} in frame {i + 1}?", (track.colours[i],), "colour")
        for i in range(track.first, track.last + 1)
    ]
    if change is not None and track.first < change <= track.last:
        before, after = track.colours[0], track.colours[change]
        question = f"What colour does the {shape} change to?"
        turns.append(Turn(question, (after,), "new colour"))
        question = f"What colour has the {shape} before it changes?"
        turns.append(Turn(question, (before,), "old colour"))
        turns.append(
            Turn(f"In which frame changes the {shape}?", (str(change + 1),), "change frame")
        )
    return turns


def _presence_turns(track: Track, rng: Random) -> list[Turn]:
    """Ask for first and last frame, mostly of objects that come or go: all frames as common."""
    turns = []
    if track.first > 0 or rng.random() < 0.12:
        question = f"In which frame is the {track.shape} first seen?"
        turns.append(Turn(question, (str(track.first + 1),), "first frame"))
    if track.last < FRAMES - 1 or rng.random() < 0.12:
        question = f"In which frame is the {track.shape} last seen?"
        turns.append(Turn(question, (str(track.last + 1),), "last frame"))
    return turns


def _only(tracks: list[Track], question: str, kind: str) -> list[Turn]:
    """Ask which object it is, if exactly one qualifies."""
    return [Turn(question, (tracks[0].shape,), kind)] if len(tracks) == 1 else []


def _scene_turns(tracks: list[Track]) -> list[Turn]:
    """Ask about whole frames: how many objects, which one appears, vanishes, changes."""
    turns = []
    for i in range(FRAMES):
        count = sum(t.is_visible(i) for t in tracks)
        turns.append(Turn(f"How many objects are in frame {i + 1}?", (str(count),), "count"))
        if i:
            news = [t for t in tracks if t.first == i]
            gone = [t for t in tracks if t.last == i - 1]
            turns += _only(news, f"What appears in frame {i + 1}?", "appears")
            turns += _only(gone, f"What is gone in frame {i + 1}?", "vanishes")
    changed = [t for t in tracks if t.change is not None and t.first < t.change <= t.last]
    turns += _only(changed, "What changes its colour?", "changes")
    still = [t for t in tracks if t.direction == "it stays" and t.last > t.first]
    return turns + _only(still, "What does not move?", "stays")


def _spread(turns: list[Turn], rng: Random, count: int) -> list[Turn]:
    """Choose questions of as many kinds as possible, so that no kind and no answer dominates."""
    rng.shuffle(turns)
    seen: dict[str, int] = {}
    ranked = []
    for turn in turns:
        ranked.append((seen.get(turn.kind, 0), turn))
        seen[turn.kind] = seen.get(turn.kind, 0) + 1
    ranked.sort(key=lambda pair: pair[0])
    chosen = [turn for _, turn in ranked[:count]]
    rng.shuffle(chosen)
    return chosen


def _marks(tracks: list[Track]) -> list[Mark]:
    return [
        Mark(label, *t.places[i], t.radius, i)
        for t in tracks
        for i in range(t.first, t.last + 1)
        for label in (t.shape, t.colours[i])
    ]


def _frame(ground: Image.Image, tracks: list[Track], index: int, rng: Random) -> Image.Image:
    picture = ground.copy()
    for t in tracks:
        if t.is_visible(index):
            colour = jitter(COLOURS[t.colours[index]], rng, 8)
            draw_shape(picture, t.shape, colour, t.places[index], t.radius)
    return add_noise(picture, rng)


def generate(seed: int) -> Sample:
    """Return the sequence of one seed: four frames and eight questions of different kinds."""
    rng = Random(seed)
    ground = background(rng.choice(tuple(TONES)), rng.choice(STYLES), rng)
    tracks = _random_tracks(rng)
    frames = [_frame(ground, tracks, i, rng) for i in range(FRAMES)]
    turns = _scene_turns(tracks)
    for track in tracks:
        turns += _motion_turns(track) + _colour_turns(track) + _presence_turns(track, rng)
    return Sample(frames, _spread(turns, rng, 8), marks=_marks(tracks))
