"""`duotone tune`: search the space of caches on one's own model and samples."""

from .report import make_report, write_report
from .run import Job, Tuned, make_job
from .settings import TuneSettings

__all__ = ["Job", "TuneSettings", "Tuned", "make_job", "make_report", "write_report"]
