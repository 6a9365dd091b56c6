"""Pure tensor arithmetic: specs of schemes, and codes of few bits. Imports torch only."""

from duotone.quant.accounting import bits_per_element as bits_per_element
from duotone.quant.accounting import tensor_bytes as tensor_bytes
from duotone.quant.affine import Quantized as Quantized
from duotone.quant.affine import quantize as quantize
from duotone.quant.averaging import average_codes as average_codes
from duotone.quant.calibration import calibration_affine as calibration_affine
from duotone.quant.eviction import Eviction as Eviction
from duotone.quant.packing import pack as pack
from duotone.quant.packing import packed_bytes as packed_bytes
from duotone.quant.packing import unpack as unpack
from duotone.quant.schemes import SCHEMES as SCHEMES
from duotone.quant.schemes import scheme as scheme
from duotone.quant.schemes import schemes as schemes
from duotone.quant.spec import CacheSpec as CacheSpec
from duotone.quant.spec import KVSpec as KVSpec
from duotone.quant.spec import LayerRule as LayerRule
from duotone.quant.spec import Sharing as Sharing
from duotone.quant.spec import TensorSpec as TensorSpec
