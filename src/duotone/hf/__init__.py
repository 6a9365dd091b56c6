"""The only room that knows transformers: the cache, the attention function, and `enable`."""

from duotone.hf.cache.cache import QuantizedCache as QuantizedCache
from duotone.hf.model.facts import ModelFacts as ModelFacts
from duotone.hf.model.facts import model_facts as model_facts
from duotone.hf.recommended import Recommendation as Recommendation
from duotone.hf.recommended import recommend as recommend
from duotone.hf.session import Session as Session
from duotone.hf.session import enable as enable
from duotone.hf.verdict import Support as Support
from duotone.hf.verdict import supports as supports
