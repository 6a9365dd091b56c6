"""Scripts behind this repository's tables, by subject; `duotone report` renders RENDERERS.

Run one from the repository's root: `python -m benchmarks.SUBJECT.SCRIPT --help`.
"""

from .mquant.quality_tables import RENDERERS as MQUANT_QUALITY
from .mquant.speed_tables import RENDERERS as MQUANT_SPEED
from .mquant.stress_tables import RENDERERS as MQUANT_STRESS
from .quality.conversation_tables import RENDERERS as CONVERSATION
from .quality.tables import RENDERERS as QUALITY
from .quality.zoo_bounds import RENDERERS as BOUNDS
from .quality.zoo_tables import RENDERERS as ZOO
from .serve.tables import RENDERERS as SERVE
from .supports.tables import RENDERERS as SUPPORTS
from .transform.tables import RENDERERS as TRANSFORM

# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    **CONVERSATION,
    **MQUANT_QUALITY,
    **MQUANT_SPEED,
    **MQUANT_STRESS,
    **BOUNDS,
    **QUALITY,
    **SERVE,
    **SUPPORTS,
    **TRANSFORM,
    **ZOO,
}
