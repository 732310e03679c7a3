"""Checkpoints written: safetensors files, whole or not at all, and compared with where they come from."""

from raywl.writing.converting import ConvertReport, convert
from raywl.writing.single import convert_bin_to_safetensor_file

__all__ = ["ConvertReport", "convert", "convert_bin_to_safetensor_file"]
