"""Alternatives to what transform coding does here, at the same budget, on the embedded model.

    python benchmarks/transform_alternatives.py --out results/transform      alternatives.json

Codes by coordinate descent under the metric, keys before RoPE, codes shared by two layers, gains by
channel, and the top of the channels alone. In float32, so that a changed coder (`transform_coders`)
and the product's cache differ by nothing else; the question is asked later, data are held out.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from quality_table import log
from transform_calibrations import (
    Calibrator,
    hadamard,
    identity,
    per_layer,
    per_pair,
)
from transform_coders import Change, Metrics, measure_change
from transform_rope import spec_before, theta_of
from transform_table import KIVI_SPANS, PRESET_SETTINGS, held_out

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.calibrate.run import widths_of
from duotone.loading import Loaded, load
from duotone.quant.layer_rules import Sharing
from duotone.report.provenance import stamp
from duotone.tune.heldout import entry
from duotone.tune.objective import measure

BASE = PRESET_SETTINGS
LLOYD = TensorSpec(1, levels="lloyd")


@dataclass(frozen=True)
class Row:
    """A spec, made when its turn comes, and how it is coded; None: by the product's cache."""

    make: Callable[[], CacheSpec]
    change: Change | None = None


Rows = dict[str, Row]


def metrics_of(maker: Calibrator) -> Metrics:
    """C of every layer and tensor as `klt` takes it."""
    found = {}
    for layer, moments in enumerate(maker.moments):
        for which, metric in (("key", moments.scores), ("value", moments.output)):
            level = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
            floor = BASE.regularization * level * torch.eye(metric.shape[-1]).to(metric)
            found[layer, which] = (metric + floor) / level
    return found


def ungained(spec: CacheSpec) -> CacheSpec:
    """The same spec whose levels stay as Lloyd's method leaves them."""

    def plain(policy: KVSpec | None) -> KVSpec | None:
        if policy is None:
            return None
        return KVSpec(*(t.replace(gain=1.0, energy=0.0) for t in (policy.key, policy.value)))

    names = ("visual", "background")
    rules = tuple(
        rule.replace(**{name: plain(getattr(rule, name)) for name in names}) for rule in spec.layers
    )
    return spec.replace(**{name: plain(getattr(spec, name)) for name in names}, layers=rules)


def known() -> Rows:
    """What all is held against."""
    specs = {"duotone @1": duotone.scheme("duotone"), "span, KIVI's axes @2": KIVI_SPANS}
    return {label: Row(lambda spec=spec: spec) for label, spec in specs.items()}


def signs() -> dict[str, Callable[[], CacheSpec]]:
    """One bit for every channel of the whole span."""
    best = KVSpec(LLOYD.replace(gain="fit"), LLOYD.replace(gain=1.25))
    plain = KVSpec(TensorSpec(), TensorSpec())
    return {
        "signs, gains": lambda: CacheSpec(visual=best, ranges="run"),
        "signs, no gains": lambda: CacheSpec(visual=KVSpec(LLOYD, LLOYD), ranges="run"),
        "min/max, 1 bit": lambda: CacheSpec(visual=plain, ranges="run"),
    }


def descents(maker: Calibrator) -> Rows:
    """Nearest codes against codes by coordinate descent, where the basis does not do it."""
    metrics, spec = Change(metrics=metrics_of(maker)), maker.spec
    plain = replace(BASE, key=TensorSpec(), value=TensorSpec())
    layered = per_layer(maker.moments)
    makes = signs() | {
        "no basis": partial(spec, "no basis", BASE, alter=identity),
        "hadamard": partial(spec, "hadamard", BASE, alter=hadamard),
        "one basis per layer": partial(spec, "one basis per layer", BASE, moments=layered),
        "no basis, min/max": partial(spec, "no basis min max", plain, alter=identity),
        "preset": partial(spec, "preset", BASE),
    }
    makes = {label: cache(make) for label, make in makes.items()}
    rows = {}
    for label, make in makes.items():
        rows[label] = Row(make)
        rows[f"{label}, codes by descent"] = Row(make, metrics)
    for label in ("no basis", "one basis per layer"):
        bare = partial(lambda make: ungained(make()), makes[label])
        rows[f"{label}, no gains, codes by descent"] = Row(bare, metrics)
    return {"preset, faked": Row(makes["preset"], Change())} | rows


def gains(maker: Calibrator) -> Rows:
    """A gain per block in closed form, one per channel, or a constant."""
    key, value = (BASE.quantizer(which, parted=True) for which in ("key", "value"))
    fields = {
        "K's gain 1": {"key": key.replace(gain=1.0)},
        "V's gain 1": {"value": value.replace(gain=1.0)},
        "V's gain fitted per block": {"value": value.replace(gain="fit")},
    }
    rows = {
        label: Row(partial(maker.spec, label, replace(BASE, **own)))
        for label, own in fields.items()
    }
    both = replace(BASE, key=key.replace(gain=1.0), value=value.replace(gain=1.0))
    for label, settings, names in (
        ("K's gains fitted per channel", replace(BASE, key=both.key), ("key",)),
        ("V's gains fitted per channel", replace(BASE, value=both.value), ("value",)),
        ("both gains fitted per channel", both, ("key", "value")),
    ):
        rows[label] = Row(partial(maker.spec, label, settings), Change(gains=names))
    return rows


def quarters(maker: Calibrator) -> Rows:
    """A quarter of the channels at 4 bits in every tensor, and nothing else."""

    def top(spectra: Any, *_: Any) -> dict:
        return dict.fromkeys(spectra, ((4, 1 / 4),))

    whole = replace(BASE, foreground=None, bits=1.0)
    return {
        "top d/4 at 4 bits, whole spans": Row(partial(maker.spec, "top", whole, widths=top)),
        "mixed widths, 1 bit, whole spans": Row(partial(maker.spec, "mixed", whole)),
        "top d/4 at 4 bits, two parts": Row(partial(maker.spec, "top parts", BASE, widths=top)),
    }


def before_rope(maker: Calibrator) -> Rows:
    """Keys coded before RoPE, tokens ordered there or behind it."""
    theta, made = theta_of(maker.loaded.model), []

    def once() -> CacheSpec:
        made.extend([] if made else [spec_before(maker, BASE, theta)])
        return made[0]

    behind = maker.spec("preset", BASE)
    return {
        "K before RoPE": Row(once, Change(theta=theta)),
        "K before RoPE, tokens ordered behind it": Row(once, Change(theta=theta, order_by=behind)),
    }


def shares(maker: Calibrator) -> Rows:
    """Two layers with one basis and one code per number, which then may have twice the bits."""
    pairs = per_pair(maker.moments)

    def equal(spectra: Any, settings: Any, parts: Any) -> dict:
        """Widths of both layers by the mean of their spectra."""
        mean = {n: (s + spectra[n[0] ^ 1, *n[1:]].to(s)) / 2 for n, s in spectra.items()}
        return widths_of(mean, settings, parts)

    def uniform(bits: int, share: Sharing | None) -> CacheSpec:
        """One width for all, which is what the product can share."""
        settings = replace(BASE, foreground=None)
        spec = maker.spec(f"uniform {bits}", settings, moments=pairs)
        rules = tuple(r.replace(visual=_one_width(r.visual, bits)) for r in spec.layers)
        return spec.replace(visual=_one_width(spec.visual, bits), layers=rules, share=share)

    double = replace(BASE, bits=2 * BASE.bits)
    own, mean = Sharing(key=0, value=0), Sharing(key=0, value=0, weights=(0.5, 0.5))
    paired = {"moments": pairs, "widths": equal}
    return {
        "one basis per two layers": Row(partial(maker.spec, "pairs", BASE, **paired)),
        "two layers share codes of twice the bits": Row(
            partial(maker.spec, "shared", double, **paired), Change(shared=True)
        ),
        "2 bits, one basis per two layers, not shared": Row(partial(uniform, 2, None)),
        "2 bits, codes shared (XQuant, one layer's)": Row(partial(uniform, 2, own)),
        "2 bits, codes shared (XQuant, averaged)": Row(partial(uniform, 2, mean)),
        "1 bit, one basis per two layers, not shared": Row(partial(uniform, 1, None)),
    }


def _one_width(policy: KVSpec | None, bits: int) -> KVSpec | None:
    if policy is None:
        return None
    tensors = (policy.key, policy.value)
    return KVSpec(*(t.replace(bits=bits, classes=None, energy=0.0) for t in tensors))


def measured(loaded: Loaded, data: dict, row: Row, span: int) -> dict[str, Any]:
    """Numbers of one row on all tasks."""
    spec, tasks = row.make(), {}
    for name, batches in data.items():
        if row.change is None:
            parts = [measure(loaded.model, batch, spec, impl="reference") for batch in batches]
        else:
            parts = [measure_change(loaded.model, b, spec, row.change, span) for b in batches]
        tasks[name] = sum(parts[1:], parts[0])
    return entry(tasks)


def write(arguments: Any, made_by: dict, rows: dict) -> None:
    """The file as far as it is known."""
    result = {
        "schema": "duotone.transform.alternatives/1",
        **made_by,
        "dtype": "float32",
        "calibration_samples_per_task": arguments.samples,
        "heldout_samples_per_task": arguments.n,
        "later_question": True,
        "rows": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    (arguments.out / "alternatives.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64, help="per task, to calibrate on")
    parser.add_argument("--n", type=int, default=96, help="per task, held out")
    parser.add_argument("--only", help="rows whose label has this in it")
    parser.add_argument("--minutes", type=float, default=3.0, help="no row is begun later")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if (arguments.out / "alternatives.json").exists():
        raise SystemExit("there is an alternatives.json already")
    torch.manual_seed(0)
    began = time.monotonic()
    loaded = load(dtype=torch.float32)
    made_by, span = stamp(loaded.model.device), loaded.model.config.image_seq_length
    data = held_out(loaded, arguments.n)
    log("held-out samples answered")
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        maker = Calibrator(loaded, arguments.samples, 64, Path(folder))
        log("moments gathered")
        parts = {"what is compared with": known(), "codes": descents(maker)}
        parts |= {"gains": gains(maker), "keys before RoPE": before_rope(maker)}
        parts |= {"widths": quarters(maker), "layers": shares(maker)}
        for part, rows in parts.items():
            found[part] = {}
            for label, row in rows.items():
                if arguments.only and arguments.only not in label:
                    continue
                if time.monotonic() - began > 60 * arguments.minutes:
                    log("out of time before", label)
                    continue
                found[part][label] = one = measured(loaded, data, row, span)
                log(f"{label:50} {one['bits']:.3f} {one['kl']:.6f}")
                write(arguments, made_by, found)


if __name__ == "__main__":
    main()
