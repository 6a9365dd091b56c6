"""Schemes that the page offers, with the bits that each takes, and why a model refuses some."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from duotone.inference.compare import check_scheme_fits
from duotone.loading import Loaded
from duotone.planning.memory import true_bits

WIDTHS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Choice:
    """One scheme of the page.

    bits: widths that it can have; () for a scheme of fixed widths. default: its own width.
    true_bits: per number of the usual shape, every byte counted, at the default width.
    refused: the reason against it for this model; "" where it fits.
    """

    name: str
    summary: str
    bits: tuple[int, ...]
    default: int | None
    true_bits: float
    refused: str
    spec: Any = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe data for the page."""
        return {name: value for name, value in asdict(self).items() if name != "spec"}


class Choices:
    """All registered schemes for one model, and specs that are added."""

    def __init__(self, loaded: Loaded) -> None:
        import duotone

        self._loaded = loaded
        self._all = {
            name: _registered(loaded, name, summary) for name, summary in duotone.schemes().items()
        }

    def add(self, name: str, spec: Any) -> tuple[str, int | None]:
        """(scheme, bits) of a spec in the list; a spec that is none of them joins, as the first.

        name: NAME, NAME@BITS, or a file's name. bits: None for the scheme's own.
        """
        scheme, _, width = name.partition("@")
        bits = int(width) if width.isdecimal() else None
        if scheme in self._all:
            widths = [bits] if bits else [None, *self._all[scheme].bits]
            found = next((b for b in widths if self._known(scheme, b) == spec), "none")
            if found != "none":
                return scheme, found
            name = f"{name}, changed"
        self._all = {name: _own(self._loaded, name, spec), **self._all}
        return name, None

    def _known(self, name: str, bits: int | None) -> Any:
        choice = self._all[name]
        return self.spec(name, bits) if bits in (None, *choice.bits) else None

    def to_list(self) -> list[dict[str, Any]]:
        """JSON-safe data of all, added ones first."""
        return [choice.to_dict() for choice in self._all.values()]

    def spec(self, name: Any, bits: Any) -> Any:
        """The CacheSpec of a scheme at some bits; None: its own.

        Errors: ValueError for an unknown name, or bits that it does not take.
        """
        import duotone

        if not isinstance(name, str) or name not in self._all:
            raise ValueError(f"the scheme must be one of the page's list, got {name!r}")
        choice = self._all[name]
        if bits is None or bits == choice.default:
            return choice.spec
        if bits not in choice.bits:
            known = ", ".join(map(str, choice.bits)) or "its own bits only"
            raise ValueError(f"{name} takes {known}; got bits={bits!r}")
        return duotone.scheme(name, bits=bits)


def _own(loaded: Loaded, name: str, spec: Any) -> Choice:
    summary = "a specification of yours"
    return Choice(name, summary, (), None, true_bits(spec), _refused(loaded, spec), spec)


def _registered(loaded: Loaded, name: str, summary: str) -> Choice:
    import duotone

    spec = duotone.scheme(name)
    widths = {bits: other for bits in WIDTHS if (other := _at(name, bits)) is not None}
    default = next((bits for bits, other in widths.items() if other == spec), None)
    bits, refused = tuple(widths), _refused(loaded, spec)
    return Choice(name, summary, bits, default, true_bits(spec), refused, spec)


def _at(name: str, bits: int) -> Any:
    """The scheme's spec at some bits; None where it does not take them."""
    import duotone

    try:
        return duotone.scheme(name, bits=bits)
    except ValueError:
        return None


def _refused(loaded: Loaded, spec: Any) -> str:
    try:
        check_scheme_fits(loaded, spec, has_images=True)
    except ValueError as error:
        return str(error)
    return ""
