"""Containers of a quantized cache: plain tensors, ragged per sequence. Imports quant only.

`Ledger` knows the store and slot of every token, once for all layers. `LayerStore` holds one
layer's tensors and moves them as the ledger's plans say. Policy is in the spec.
"""

from duotone.cache.blocks import BlockTable as BlockTable
from duotone.cache.eviction import Importance as Importance
from duotone.cache.layer import LayerStore as LayerStore
from duotone.cache.ledger import AppendPlan as AppendPlan
from duotone.cache.ledger import Ledger as Ledger
from duotone.cache.packed import PackedTensor as PackedTensor
from duotone.cache.packing import pack_tensor as pack_tensor
from duotone.cache.pair import PackedPair as PackedPair
from duotone.cache.places import StaticPlaces as StaticPlaces
from duotone.cache.report import MemoryReport as MemoryReport
from duotone.cache.report import memory_report as memory_report
from duotone.cache.report import static_memory_report as static_memory_report
from duotone.cache.saved import Saved as Saved
from duotone.cache.saved import Shape as Shape
from duotone.cache.segments import DenseSegment as DenseSegment
from duotone.cache.segments import PackedSegment as PackedSegment
from duotone.cache.segments import Segment as Segment
from duotone.cache.static import StaticStore as StaticStore
from duotone.cache.static import flush_all as flush_all
from duotone.cache.thaw import chronological as chronological
from duotone.cache.thaw import thaw as thaw
from duotone.cache.visibility import Visibility as Visibility
