"""Transform coding on the embedded model: the preset, widths against quality, choices.

    python -m benchmarks.transform.table preset --out DIR     duotone-klt.safetensors and .json
    python -m benchmarks.transform.table widths --out DIR     TASK.json, scores and KL, held out
    python -m benchmarks.transform.table choices --out DIR    choices.json, KL, held out

The question is always asked after the pictures' cache was quantized. Calibration takes the first
samples of the tasks' calibration split; measured is their held-out split.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.calibrate import Settings, calibrate, calibration_data
from duotone.calibrate.run import Learned, learn, spec_with
from duotone.evaluate.loader import Encoder, default_workers, load_batches
from duotone.hf.facts import model_facts
from duotone.inference.batch import prepare
from duotone.loading import Loaded, load
from duotone.report.provenance import stamp, write_new_json
from duotone.tasks import TASKS
from duotone.tune.heldout import entry
from duotone.tune.objective import measure
from duotone.tune.prefilled import Prefilled, later_where_possible, prefill

from ..quality.table import log, table_of_task, write

PRESET = "duotone-klt"
# Code bits that come to 1.15 true ones with spans of 256 tokens. Calibrated on the tasks it is for,
# the preset needs less regularization than data of other tasks want.
PRESET_SETTINGS = Settings(bits=0.93, regularization=0.1)
WIDTHS = (0.4, 0.65, 1.4, 2.2)
# Kernels store codes with padding; here every scheme is counted as packed.
IMPL = "reference"
KIVI_SPANS = CacheSpec(
    visual=KVSpec(TensorSpec(2, "tokens", 32), TensorSpec(2, "channels", 32)), ranges="run"
)
Make = Callable[[], CacheSpec]


class Calibrator:
    """Specs by settings: samples are asked once for settings that share their sums.

    folder: for the files of bases.
    """

    def __init__(self, loaded: Loaded, samples: int, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.batches = calibration_data(loaded, list(TASKS.values()), samples, 64).batches
        self.learned: dict[tuple, tuple[Learned, str]] = {}

    def spec(self, settings: Settings) -> CacheSpec:
        """The spec that `duotone calibrate` makes with these settings."""
        sums = tuple(settings.of_sums().values())
        if sums not in self.learned:
            learned = learn(self.loaded, self.batches, settings)
            file = self.folder / f"{len(self.learned)}.safetensors"
            learned.bases.save(file)
            self.learned[sums] = learned, str(file)
        learned, file = self.learned[sums]
        facts = model_facts(self.loaded.model)
        return spec_with(facts, learned.widths(settings), file, settings)


def preset(loaded: Loaded, arguments: argparse.Namespace, folder: Path) -> None:
    """Write the files that ship."""
    data = calibration_data(loaded, list(TASKS.values()), arguments.calibration, 16)
    bases, spec, report = calibrate(
        loaded, data.batches, PRESET_SETTINGS, file=f"preset:{PRESET}", data=data.sources
    )
    bases.save(arguments.out / f"{PRESET}.safetensors")
    (arguments.out / f"{PRESET}.json").write_text(spec.to_json() + "\n", encoding="utf-8")
    log("code bits", report["bits"])


def known() -> dict[str, CacheSpec]:
    """Schemes that calibrated specs are compared with."""
    names = {"duotone @1": ("duotone", 1), "duotone-parts @1": ("duotone-parts", 1)}
    names |= {"duotone-parts @2": ("duotone-parts", 2), "calibquant @1": ("calibquant", 1)}
    specs = {label: duotone.scheme(name, bits=bits) for label, (name, bits) in names.items()}
    return specs | {"span, KIVI's axes @2": KIVI_SPANS}


def widths(loaded: Loaded, arguments: argparse.Namespace, folder: Path) -> None:
    """Write scores, agreement and KL by width."""
    maker = Calibrator(loaded, arguments.calibration, folder)
    settings = {"duotone-klt": PRESET_SETTINGS}
    settings |= {f"klt {bits}": replace(PRESET_SETTINGS, bits=bits) for bits in WIDTHS}
    settings["klt whole 1.0"] = replace(PRESET_SETTINGS, bits=1.0, foreground=None)
    specs = {label: maker.spec(one) for label, one in settings.items()} | known()
    for name in arguments.tasks.split(","):
        schema = "duotone.transform.widths/1"
        data, evaluation = table_of_task(loaded, TASKS[name], specs, arguments, schema, kl=True)
        write(arguments.out, name, data, evaluation)
        log("wrote", name)


def held_out(loaded: Loaded, samples: int, batch_size: int = 96) -> dict[str, list[Prefilled]]:
    """The tasks' first held-out samples, answered in 16 bit."""
    made = {}
    for name, task in TASKS.items():
        encoder = Encoder(loaded.processor, loaded.takes_images)
        workers = default_workers(loaded.model.device)
        batches = load_batches(task, encoder, "heldout", samples, batch_size, workers)
        made[name] = [
            prefill(
                loaded.model,
                later_where_possible(prepare(loaded.model, tensors)),
                task.max_new_tokens,
            )
            for _, tensors in batches
        ]
    return made


def measured(
    loaded: Loaded, data: Mapping[str, list[Prefilled]], specs: Mapping[str, Make], until_s: float
) -> dict[str, Any]:
    """{label: numbers} of specs, each made at its turn, on held-out samples.

    until_s: of the monotonic clock; no spec is begun later.
    """
    rows = {}
    for label, make in specs.items():
        if time.monotonic() > until_s:
            log("out of time before", label)
            break
        spec, tasks = make(), {}
        for name, batches in data.items():
            parts = [measure(loaded.model, batch, spec, impl=IMPL) for batch in batches]
            tasks[name] = sum(parts[1:], parts[0])
        rows[label] = entry(tasks)
        log(f"{label:45} {rows[label]['bits']:.3f} {rows[label]['kl']:.6f}")
    return rows


def choices_of(base: Settings) -> dict[str, Settings]:
    """Every choice of a calibration, one at a time from `base`."""
    key, value = (base.quantizer(which, parted=True) for which in ("key", "value"))
    quantizers = {
        "no energies": {"key": key.replace(energy=0.0), "value": value.replace(energy=0.0)},
        "no gain": {"key": key.replace(gain=1.0), "value": value.replace(gain=1.0)},
        "min/max levels": {"key": TensorSpec(), "value": TensorSpec()},
        "K in groups of 64": {"key": key.replace(group=64)},
    }
    values = {
        "foreground": (None, 0.25, 0.35, 0.5, 0.6),
        "unit": (16, 4),
        "mix": (1.0,),
        "widths": ((0, 4), (0, 2, 4), (0, 1, 2)),
        "foreground_weight": (1.0, 4.0, 16.0),
        "key_weight": (0.25, 1.0),
        "regularization": (0.01, 0.3, 1.0),
    }
    choices = {"preset": base}
    choices |= {label: replace(base, **fields) for label, fields in quantizers.items()}
    for name, others in values.items():
        for other in others:
            label = f"{name} {other}".replace("(", "").replace(")", "")
            choices[label] = replace(base, **{name: other})
    return choices


def choices(loaded: Loaded, arguments: argparse.Namespace, folder: Path) -> None:
    """Write choices.json."""
    made_by, until_s = stamp(loaded.model.device), time.monotonic() + 60 * arguments.minutes
    maker = Calibrator(loaded, arguments.calibration, folder)
    makes: dict[str, Make] = {}
    for label, spec in known().items():
        makes[label] = partial(CacheSpec.from_dict, spec.to_dict())
    for label, settings in choices_of(PRESET_SETTINGS).items():
        makes[label] = partial(maker.spec, settings)
    data = {
        "schema": "duotone.transform.choices/1",
        **made_by,
        "calibration_samples_per_task": arguments.calibration,
        "heldout_samples_per_task": arguments.samples,
        "later_question": True,
        "rows": measured(loaded, held_out(loaded, arguments.samples), makes, until_s),
    }
    write_new_json(arguments.out / "choices.json", data)


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("preset", "widths", "choices"))
    parser.add_argument("--calibration", type=int, default=64, help="samples per task")
    parser.add_argument("--samples", type=int, default=200, help="per task, held out")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of widths")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, default=60.0, help="stops at a batch or a spec")
    parser.add_argument("--impl", default=IMPL)
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(later_question=True, window=32)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    run = {"preset": preset, "widths": widths, "choices": choices}[arguments.table]
    with tempfile.TemporaryDirectory() as folder:
        run(load(), arguments, Path(folder))


if __name__ == "__main__":
    main()
