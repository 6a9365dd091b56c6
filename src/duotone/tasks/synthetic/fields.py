"""Random contents of documents: names, codes, amounts, dates and the questions about them.

Values are drawn from spaces of thousands to billions, so an answer cannot be guessed from its
question, only read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

_NAMES = """
    Ada Alma Anna Arno Bela Bruno Carla Clara Dario Edda Elias Emil Erik Eva Felix Fiona Greta
    Hanna Hugo Ida Igor Ines Iris Ivan Jana Jonas Karl Klara Lars Lea Leo Lina Lotte Luca Maja
    Marco Mila Nadia Nils Nora Olga Omar Oskar Paula Pia Rita Rosa Sara Simon Sofia Theo Tilda
    Tom Ulla Vera Viktor Wanda Yara Zoe"""
_GOODS = """
    apple bagel bread butter candle carrot cheese cocoa coffee cookie eggs flour ginger honey
    jam juice lamp lemon melon milk mug noodles nuts olive onion orange paper pasta peach pear
    pen pepper pizza plum radish rice rope salad salt soap soup spoon sugar tea tomato towel
    vase water wine yogurt"""
_ONSETS = "b d f g h j k l m n p r s t v w z br dr fl gr kr pl st tr sch"
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"

FIRST_NAMES, GOODS = tuple(_NAMES.split()), tuple(_GOODS.split())
ONSETS, MONTHS = tuple(_ONSETS.split()), tuple(_MONTHS.split())
VOWELS = ("a", "e", "i", "o", "u", "au", "ei")
CODAS = ("", "", "l", "m", "n", "r", "s", "t", "nd", "lt", "rk")
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def surname(rng: Random) -> str:
    """Invent a pronounceable family or place name."""
    syllables = rng.randint(2, 3)
    text = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))
    return (text + rng.choice(CODAS)).capitalize()[:9]


def person(rng: Random) -> str:
    """Return a first name and an invented family name."""
    return f"{rng.choice(FIRST_NAMES)} {surname(rng)}"


def number(rng: Random, digits: int) -> str:
    """Return a number of so many digits, the first not zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code(rng: Random) -> str:
    """Return a reference such as `KX-4827`, `T90215` or `38-QH`."""
    letters = "".join(rng.choice(CODE_LETTERS) for _ in range(rng.randint(1, 3)))
    digits = number(rng, rng.randint(2, 5))
    pattern = rng.choice(("{0}-{1}", "{0}{1}", "{1}-{0}"))
    return pattern.format(letters, digits)


def amount(rng: Random) -> str:
    """Return a price below a thousand with two decimals."""
    return f"{rng.randrange(10 ** rng.randint(1, 3))}.{rng.randrange(100):02d}"


def date(rng: Random) -> str:
    """Return a date in one of three notations."""
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1990, 2039)
    return rng.choice(
        (
            f"{day:02d}.{month:02d}.{year}",
            f"{year}-{month:02d}-{day:02d}",
            f"{day} {MONTHS[month - 1]} {year}",
        )
    )


def phone(rng: Random) -> str:
    """Return a telephone number."""
    return f"{number(rng, 3)}-{number(rng, 4)}"


def clock(rng: Random) -> str:
    """Return a time of day."""
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def seat(rng: Random) -> str:
    """Return a row and a seat letter."""
    return f"{rng.randint(1, 60)}{rng.choice('ABCDEF')}"


@dataclass(frozen=True)
class Field:
    """A kind of entry: its question, its label in documents, its values."""

    question: str
    labels: tuple[str, ...]
    value: Callable[[Random], str]


FIELDS = (
    Field("What is the invoice number?", ("Invoice", "Invoice no", "Inv. number"), code),
    Field("What is the order number?", ("Order", "Order no"), code),
    Field("What is the reference?", ("Ref", "Reference"), code),
    Field("Who is the customer?", ("Customer", "Client", "Name"), person),
    Field("Who is the seller?", ("Seller", "Sold by", "Clerk"), person),
    Field("What is the date?", ("Date", "Issued"), date),
    Field("When is it due?", ("Due", "Due date", "Pay by"), date),
    Field("What is the total?", ("Total", "Amount", "Sum"), amount),
    Field("What is the tax?", ("Tax", "VAT"), amount),
    Field("What is the city?", ("City", "Town", "Place"), surname),
    Field("What is the phone number?", ("Phone", "Tel"), phone),
    Field("What is the account?", ("Account", "Acct"), lambda rng: number(rng, 6)),
    Field("What is the time?", ("Time", "Hour"), clock),
    Field("What is the weight?", ("Weight",), lambda rng: f"{rng.randint(2, 950)} kg"),
    Field("What is the seat?", ("Seat",), seat),
    Field("What is the room?", ("Room", "Hall"), lambda rng: number(rng, 3)),
)


@dataclass(frozen=True)
class Entry:
    """One filled-in field of a document."""

    label: str
    value: str
    question: str


def entries(rng: Random, count: int) -> list[Entry]:
    """Fill in different fields with random values."""
    return [
        Entry(rng.choice(field.labels), field.value(rng), field.question)
        for field in rng.sample(FIELDS, count)
    ]
