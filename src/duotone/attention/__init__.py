"""Decode attention over packed and dense segments, in three implementations of one signature."""

from duotone.attention.dispatch import IMPLEMENTATIONS as IMPLEMENTATIONS
from duotone.attention.dispatch import code_layouts as code_layouts
from duotone.attention.dispatch import decode_attention as decode_attention
from duotone.attention.explain import explain as explain
from duotone.attention.explain import explain_layers as explain_layers
from duotone.attention.importance import measure_importance as measure_importance
from duotone.attention.merge import merge_partials as merge_partials
from duotone.attention.reference import attend as attend
