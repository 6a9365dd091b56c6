"""Transform coding on the embedded model: the preset, and widths against quality.

    python -m benchmarks.transform.table preset --out DIR     duotone-klt.safetensors and .json
    python -m benchmarks.transform.table widths --out DIR     TASK.json, scores and KL, held out

The question is always asked after the pictures' cache was quantized. Calibration takes the first
samples of the tasks' calibration split; measured is their held-out split.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.calibrate import Settings, calibrate, calibration_data
from duotone.calibrate.run import learn, spec_with
from duotone.hf.model.facts import model_facts
from duotone.loading import Loaded, load
from duotone.tasks import TASKS

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


def calibrated(loaded: Loaded, samples: int, folder: Path) -> dict[str, CacheSpec]:
    """Specs by label, of all widths and of whole spans, which samples are asked for anew.

    folder: for the files of bases.
    """
    batches = calibration_data(loaded, list(TASKS.values()), samples, 64).batches
    parted = {"duotone-klt": PRESET_SETTINGS}
    parted |= {f"klt {bits}": replace(PRESET_SETTINGS, bits=bits) for bits in WIDTHS}
    whole = {"klt whole 1.0": replace(PRESET_SETTINGS, bits=1.0, foreground=None)}
    facts, specs = model_facts(loaded.model), {}
    for number, settings in enumerate((parted, whole)):
        learned = learn(loaded, batches, next(iter(settings.values())))
        file = folder / f"{number}.safetensors"
        learned.bases.save(file)
        for label, one in settings.items():
            specs[label] = spec_with(facts, learned.widths(one), str(file), one)
    return specs


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
    names = {"duotone @1": ("duotone", 1), "duotone-whole @1": ("duotone-whole", 1)}
    names |= {"duotone @2": ("duotone", 2), "calibquant @1": ("calibquant", 1)}
    specs = {label: duotone.scheme(name, bits=bits) for label, (name, bits) in names.items()}
    return specs | {"span, KIVI's axes @2": KIVI_SPANS}


def widths(loaded: Loaded, arguments: argparse.Namespace, folder: Path) -> None:
    """Write scores, agreement and KL by width."""
    specs = calibrated(loaded, arguments.calibration, folder) | known()
    for name in arguments.tasks.split(","):
        schema = "duotone.transform.widths/1"
        data, evaluation = table_of_task(loaded, TASKS[name], specs, arguments, schema, kl=True)
        write(arguments.out, name, data, evaluation)
        log("wrote", name)


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("preset", "widths"))
    parser.add_argument("--calibration", type=int, default=64, help="samples per task")
    parser.add_argument("--samples", type=int, default=200, help="per task, held out")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of widths")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, default=60.0, help="stops at a batch")
    parser.add_argument("--impl", default=IMPL)
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(later_question=True, window=32, stress="none")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    run = {"preset": preset, "widths": widths}[arguments.table]
    with tempfile.TemporaryDirectory() as folder:
        run(load(), arguments, Path(folder))


if __name__ == "__main__":
    main()
