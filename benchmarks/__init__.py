"""Scripts behind this repository's tables, by subject; `duotone report` renders RENDERERS.

Run one from the repository's root: `python -m benchmarks.SUBJECT.SCRIPT --help`.
"""

from .quality.tables import RENDERERS as QUALITY
from .tables import RENDERERS as MQUANT
from .transform.tables import RENDERERS as TRANSFORM

# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {**QUALITY, **MQUANT, **TRANSFORM}
