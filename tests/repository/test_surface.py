"""The names that users import, pinned: a change here is a change for them."""

import importlib

import pytest

import raywl

PUBLIC = {
    "raywl": [
        "Checkpoint",
        "GroupReport",
        "LoadPlan",
        "LoadReport",
        "ParallelContext",
        "RankGroup",
        "ReloadReport",
        "Replicate",
        "SaveReport",
        "Shard",
        "SharedTable",
        "StageReport",
        "__version__",
        "current_context",
        "errors",
        "launch",
        "load_into",
        "open_checkpoint",
        "pin",
        "reload_into",
        "save_sharded",
        "share_table",
        "stage",
        "unpin",
    ],
    "raywl.actors": ["RankGroup", "SharedTable", "launch", "pin", "share_table", "stage", "unpin"],
    "raywl.errors": [
        "AuthError",
        "CapacityError",
        "CheckpointError",
        "ClusterError",
        "CorruptFileError",
        "LeaseLostError",
        "LockError",
        "MissingFileError",
        "MissingWeightsError",
        "NodeLostError",
        "NotFoundError",
        "OfflineError",
        "RaywlError",
        "ShapeMismatchError",
        "SourceError",
        "StagingTimeout",
    ],
    "raywl.weight_utils": [
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
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names(module):
    """`__all__` is the list above, and each name is there."""
    found = importlib.import_module(module)
    assert sorted(found.__all__) == PUBLIC[module]
    for name in PUBLIC[module]:
        assert getattr(found, name) is not None


def test_names_are_listed_before_they_are_imported():
    assert set(PUBLIC["raywl"]) <= set(dir(raywl))


def test_lazy_names_are_of_their_homes():
    """A name that is imported on its first use is the same object as in its module."""
    for name, home in raywl._HOMES.items():
        assert getattr(raywl, name) is getattr(importlib.import_module(home), name)
        assert name in raywl.__all__


@pytest.mark.parametrize("name", PUBLIC["raywl"])
def test_public_names_have_docs(name):
    """Everything that a user calls says what it takes, gives and raises."""
    value = getattr(raywl, name)
    if name == "__version__":
        return
    assert value.__doc__
    if callable(value) and not isinstance(value, type) and name != "current_context":
        for section in ("Args:", "Raises:"):
            assert section in value.__doc__, f"{name}: no {section}"
