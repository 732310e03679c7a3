"""What the config of a quantised checkpoint says of its tensors: sizes of blocks, groups, words; dtypes."""

from raywl.quant.base import QuantizationConfig
from raywl.quant.bitsandbytes import BitsAndBytesConfig
from raywl.quant.compressed_tensors import CompressedTensorsConfig, WeightScheme
from raywl.quant.fp8 import Fp8Config
from raywl.quant.gptq import AWQConfig, GPTQConfig
from raywl.quant.layouts import TensorLayout
from raywl.quant.lookup import get_quant_config, get_sparse_attention_config
from raywl.quant.modelopt import ModelOptConfig, ModelOptMixedConfig
from raywl.quant.mxfp4 import Mxfp4Config
from raywl.quant.registry import (
    get_quantization_config,
    quantization_methods,
    register_quantization_config,
)

__all__ = [
    "AWQConfig",
    "BitsAndBytesConfig",
    "CompressedTensorsConfig",
    "Fp8Config",
    "GPTQConfig",
    "ModelOptConfig",
    "ModelOptMixedConfig",
    "Mxfp4Config",
    "QuantizationConfig",
    "TensorLayout",
    "WeightScheme",
    "get_quant_config",
    "get_quantization_config",
    "get_sparse_attention_config",
    "quantization_methods",
    "register_quantization_config",
]
