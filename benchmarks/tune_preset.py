"""The search behind `duotone-tuned`: one spec for the embedded model's three tasks together.

    python benchmarks/tune_preset.py --out results/tune/duotone-tiny --minutes 10
    python benchmarks/tune_preset.py --device cuda --samples 96 --heldout 192 --batch-size 96 \
        --minutes 6 --no-plot --no-scores --out $OUT/tune

The same as `duotone tune --budget-bits 1.3 --portable`, with plain lines for progress, which a log
keeps. Needs Optuna (`pip install 'duotone[tune]'`). Interrupted, it goes on with the same --out.
`--render FOLDER` rewrites page and plot from a folder's report.json, without a model: for a search
that ran where matplotlib was missing. `--ship FOLDER` makes its spec the preset.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from duotone.loading import EMBEDDED, load
from duotone.quant.schemes import PRESETS
from duotone.tasks import TASKS
from duotone.tune import TuneSettings, make_job, make_report, write_report

SECONDS_BETWEEN_LINES = 10


class Lines:
    """A line per stage, and one now and then within."""

    def __init__(self) -> None:
        self.stage, self.written = "", 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Print where the search is."""
        now = time.monotonic()
        if stage != self.stage or now - self.written > SECONDS_BETWEEN_LINES or done == total:
            print(time.strftime("%H:%M:%S"), stage, done, f"of {total}" * bool(total), flush=True)
            self.stage, self.written = stage, now


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--budget-bits", type=float, default=1.3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--heldout", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", default="nsga2")
    parser.add_argument("--ceiling", type=float, default=8.0)
    parser.add_argument("--layers", action="store_true", help="rules for single layers, too")
    parser.add_argument("--device")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--no-scores", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/tune/duotone-tiny"))
    parser.add_argument("--render", type=Path, metavar="FOLDER")
    parser.add_argument("--ship", type=Path, metavar="FOLDER")
    return parser.parse_args()


def search(given: argparse.Namespace) -> None:
    """Run or go on with the search and write its report."""
    settings = TuneSettings(
        budget_bits=given.budget_bits,
        samples=given.samples,
        heldout=given.heldout,
        batch_size=given.batch_size,
        seed=given.seed,
        portable=not given.layers,
        ceiling=given.ceiling,
        sampler=given.sampler,
        impl=given.impl,
    )
    tasks = [TASKS[name] for name in given.tasks.split(",")]
    job = make_job(load(EMBEDDED, given.device), tasks, settings, given.out, Lines())
    tuned = job.search(given.trials, given.minutes)
    report = make_report(job, tuned, scores=not given.no_scores)
    for path in write_report(report, given.out, plot=not given.no_plot):
        print(path)


def main() -> None:
    """Search, or render or ship what a search found."""
    given = arguments()
    if given.render:
        report = json.loads((given.render / "report.json").read_text())
        write_report(report, given.render)
    elif given.ship:
        shutil.copyfile(given.ship / "spec.json", PRESETS / "duotone-tuned.json")
    else:
        search(given)


if __name__ == "__main__":
    main()
