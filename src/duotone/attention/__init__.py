"""Decode attention over packed and dense segments, in three implementations of one signature."""

from duotone.attention.chunk import attend_chunk as attend_chunk
from duotone.attention.dispatch import IMPLEMENTATIONS as IMPLEMENTATIONS
from duotone.attention.dispatch import decode_attention as decode_attention
from duotone.attention.importance import measure_importance as measure_importance
from duotone.attention.merge import merge_partials as merge_partials
from duotone.attention.plan import Plan as Plan
from duotone.attention.plan import Shape as Shape
from duotone.attention.plan import resolve as resolve
from duotone.attention.plan import resolve_layers as resolve_layers
from duotone.attention.reference import attend as attend
from duotone.attention.sdpa import in_order_for as in_order_for
