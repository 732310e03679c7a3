"""Weight utilities under the names that users of vLLM's know: change the import, and keep the code.

Nothing is defined here. What is gathered, and where it lives:

- files and locks: `atomic_writer`, `get_lock` (`raywl.locks`);
- downloads from a hub and from ModelScope (`raywl.sources`);
- quantisation configs (`raywl.quant`);
- which files hold the weights: the `filter_*` functions, `resolve_mm_encoder_only_lm_prefixes`
  (`raywl.checkpoint.filters`), `WeightsMapper` (`raywl.remap.mapper`);
- iterators over weight files (`raywl.iterators`);
- `convert_bin_to_safetensor_file` (`raywl.writing`);
- page cache and memory (`raywl.node`);
- expert parallelism, names of KV-cache scales and of experts (`raywl.remap`);
- loaders, attention sinks and dummy weights (`raywl.loaders`).

Where a rank or size is needed and no argument gives it, it comes from the entered
`raywl.ParallelContext`, else from the default group of `torch.distributed`, else it is (0, 1).
"""

from raywl.checkpoint.filters import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
    filter_mm_encoder_only_safetensors_files,
    filter_safetensors_files_by_weight_name,
    resolve_mm_encoder_only_lm_prefixes,
)
from raywl.checkpoint.index import natural_sort_key as _natural_sort_key
from raywl.iterators.fastsafe import fastsafetensors_weights_iterator
from raywl.iterators.instant import instanttensor_weights_iterator
from raywl.iterators.np_cache import np_cache_weights_iterator
from raywl.iterators.pt import multi_thread_pt_weights_iterator, pt_weights_iterator
from raywl.iterators.runai import runai_safetensors_weights_iterator
from raywl.iterators.safetensors import (
    convert_pyslice_to_tensor,
    multi_thread_safetensors_weights_iterator,
    safetensors_weights_iterator,
)
from raywl.loaders import (
    ExpertLoader,
    MergedColumnLoader,
    QKVLoader,
    VocabLoader,
    composed_weight_loader,
    default_weight_loader,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    row_parallel_weight_loader,
    sharded_weight_loader,
)
from raywl.loaders.dummy import initialize_dummy_weights, initialize_single_dummy_weight
from raywl.loaders.sinks import load_attention_sink, load_padded_attn_sink, make_attention_sink
from raywl.locks import atomic_writer, get_lock
from raywl.node.memory import available_ram_bytes as _get_available_ram_bytes
from raywl.node.mounts import fs_type as _get_fs_type
from raywl.node.page_cache import record_checkpoint_files, release_checkpoint_page_cache
from raywl.node.prefetch import checkpoints_size_bytes as _get_checkpoints_size_bytes
from raywl.node.prefetch import prefetch_all_checkpoints as _prefetch_all_checkpoints
from raywl.node.prefetch import prefetch_checkpoint as _prefetch_checkpoint
from raywl.quant import get_quant_config, get_sparse_attention_config, register_quantization_config
from raywl.remap.experts import (
    compute_local_expert_ids,
    determine_expert_map,
    make_expert_params_mapping,
    parse_expert_id,
    should_skip_weight,
)
from raywl.remap.kv_scales import maybe_remap_kv_scale_name
from raywl.remap.mapper import WeightsMapper
from raywl.remap.moe_names import (
    get_moe_expert_mapping,
    maybe_remap_moe_expert_param_name,
    remap_moe_expert_weights,
)
from raywl.sources.modelscope import maybe_download_from_modelscope
from raywl.sources.snapshots import (
    download_safetensors_index_file_from_hf,
    download_weights_from_hf,
    enable_xet_high_performance,
)
from raywl.writing import convert_bin_to_safetensor_file

__all__ = [
    "ExpertLoader",
    "MergedColumnLoader",
    "QKVLoader",
    "VocabLoader",
    "WeightsMapper",
    "_get_available_ram_bytes",
    "_get_checkpoints_size_bytes",
    "_get_fs_type",
    "_natural_sort_key",
    "_prefetch_all_checkpoints",
    "_prefetch_checkpoint",
    "atomic_writer",
    "composed_weight_loader",
    "compute_local_expert_ids",
    "convert_bin_to_safetensor_file",
    "convert_pyslice_to_tensor",
    "default_weight_loader",
    "determine_expert_map",
    "download_safetensors_index_file_from_hf",
    "download_weights_from_hf",
    "enable_xet_high_performance",
    "fastsafetensors_weights_iterator",
    "filter_duplicate_safetensors_files",
    "filter_files_not_needed_for_inference",
    "filter_mm_encoder_only_safetensors_files",
    "filter_safetensors_files_by_weight_name",
    "get_lock",
    "get_moe_expert_mapping",
    "get_quant_config",
    "get_sparse_attention_config",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_dummy_weights",
    "initialize_single_dummy_weight",
    "instanttensor_weights_iterator",
    "load_attention_sink",
    "load_padded_attn_sink",
    "make_attention_sink",
    "make_expert_params_mapping",
    "maybe_download_from_modelscope",
    "maybe_remap_kv_scale_name",
    "maybe_remap_moe_expert_param_name",
    "multi_thread_pt_weights_iterator",
    "multi_thread_safetensors_weights_iterator",
    "np_cache_weights_iterator",
    "parse_expert_id",
    "pt_weights_iterator",
    "record_checkpoint_files",
    "register_quantization_config",
    "release_checkpoint_page_cache",
    "remap_moe_expert_weights",
    "resolve_mm_encoder_only_lm_prefixes",
    "row_parallel_weight_loader",
    "runai_safetensors_weights_iterator",
    "safetensors_weights_iterator",
    "sharded_weight_loader",
    "should_skip_weight",
]
