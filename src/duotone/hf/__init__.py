"""The only room that knows transformers: the cache, the attention function, and `enable`."""

from duotone.hf.versions import check_transformers

check_transformers()  # Before other modules ask transformers for names that it may lack.

from duotone.hf.cache.cache import QuantizedCache as QuantizedCache  # noqa: E402
from duotone.hf.model.facts import ModelFacts as ModelFacts  # noqa: E402
from duotone.hf.model.facts import model_facts as model_facts  # noqa: E402
from duotone.hf.recommended import Recommendation as Recommendation  # noqa: E402
from duotone.hf.recommended import recommend as recommend  # noqa: E402
from duotone.hf.session import Session as Session  # noqa: E402
from duotone.hf.session import enable as enable  # noqa: E402
from duotone.hf.verdict import Support as Support  # noqa: E402
from duotone.hf.verdict import supports as supports  # noqa: E402
