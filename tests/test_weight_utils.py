"""The names that users of vLLM's weight utilities change an import for: their arguments are a promise."""

import inspect

import pytest

from raywl import ParallelContext, weight_utils

EMPTY = inspect.Parameter.empty

CONTRACT = """
atomic_writer(filepath, mode="w", encoding=None)
get_lock(model_name_or_path, cache_dir=None)
convert_bin_to_safetensor_file(pt_filename, sf_filename)
maybe_download_from_modelscope(model, revision=None, download_dir=None, ignore_patterns=None, allow_patterns=None)
get_quant_config(model_config, load_config)
register_quantization_config(name, cls)
get_sparse_attention_config(model_config, load_config, sparse_attention_config_filename="sparse_attention_config.json")
enable_xet_high_performance()
download_weights_from_hf(model_name_or_path, cache_dir, allow_patterns, revision=None, subfolder=None, ignore_patterns=None)
download_safetensors_index_file_from_hf(model_name_or_path, index_file, cache_dir, subfolder=None, revision=None)

_natural_sort_key(path)
filter_duplicate_safetensors_files(hf_weights_files, hf_folder, index_file)
filter_files_not_needed_for_inference(hf_weights_files)
filter_safetensors_files_by_weight_name(hf_weights_files, is_unused_weight)
resolve_mm_encoder_only_lm_prefixes(language_model_names, *, weights_mapper=None)
filter_mm_encoder_only_safetensors_files(hf_weights_files, hf_folder, index_file, language_model_prefixes, *, weights_mapper=None)
WeightsMapper(orig_to_new_regex, orig_to_new_substr, orig_to_new_prefix, orig_to_new_suffix)

runai_safetensors_weights_iterator(hf_weights_files, use_tqdm_on_load, is_distributed=False, cpu_weights_group=None, is_shared_cpu_weight=None, process_group=...)
fastsafetensors_weights_iterator(hf_weights_files, use_tqdm_on_load)
instanttensor_weights_iterator(hf_weights_files, use_tqdm_on_load, local_expert_ids=None)

safetensors_weights_iterator(hf_weights_files, use_tqdm_on_load, safetensors_load_strategy=None, local_expert_ids=None, *, safetensors_prefetch_num_threads=8, safetensors_prefetch_block_size=16 << 20)
multi_thread_safetensors_weights_iterator(hf_weights_files, use_tqdm_on_load, max_workers=4, local_expert_ids=None)
pt_weights_iterator(hf_weights_files, use_tqdm_on_load, pt_load_map_location="cpu")
multi_thread_pt_weights_iterator(hf_weights_files, use_tqdm_on_load, pt_load_map_location="cpu", max_workers=4)
np_cache_weights_iterator(model_name_or_path, cache_dir, hf_folder, hf_weights_files, use_tqdm_on_load)
convert_pyslice_to_tensor(x)

_get_available_ram_bytes()
_get_fs_type(files)
_get_checkpoints_size_bytes(files)
_prefetch_checkpoint(path, block_size)
_prefetch_all_checkpoints(sorted_files, num_prefetch_threads, block_size)
record_checkpoint_files(files)
release_checkpoint_page_cache(files=None)

parse_expert_id(name)
compute_local_expert_ids(num_experts, ep_size, ep_rank, placement="linear")
should_skip_weight(name, local_expert_ids)
determine_expert_map(ep_size, ep_rank, num_experts, placement="linear")

maybe_remap_kv_scale_name(name, params_dict)
maybe_remap_moe_expert_param_name(name, params_dict)
remap_moe_expert_weights(weights, params_dict)
get_moe_expert_mapping(model)
make_expert_params_mapping(gate_name, down_name, up_name, num_experts, num_redundant_experts=0)

get_tensor_model_parallel_rank()
get_tensor_model_parallel_world_size()
default_weight_loader(param, loaded_weight)
row_parallel_weight_loader(param, loaded_weight)
sharded_weight_loader(axis)
composed_weight_loader(loader, fn)
QKVLoader(num_heads, num_kv_heads, head_dim)
MergedColumnLoader(sizes)
ExpertLoader(num_experts, expert_map=None, transposed=False, interleaved=False)
VocabLoader(num_embeddings, padded_to)

make_attention_sink(num_heads, dtype=None)
load_attention_sink(param, loaded_weight)
load_padded_attn_sink(param, loaded_weight, head_start, head_end)
initialize_dummy_weights(model, model_config=None, low=None, high=None, seed=1234)
initialize_single_dummy_weight(param, low=None, high=None, seed=1234, name="")
"""  # noqa: E501
"""One call for each name. An argument without a default may have one, and more may follow that do."""

LINES = [line for line in CONTRACT.splitlines() if line]


def promised(line: str) -> tuple[str, list[inspect.Parameter]]:
    """Name and parameters of a line of the contract."""
    scope: dict = {}
    exec(f"def {line}: ...", scope)  # noqa: S102
    name = line.partition("(")[0]
    return name, list(inspect.signature(scope[name]).parameters.values())


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_arguments_are_the_promised_ones(line):
    """The same names in the same order, of the same kind, with the same defaults."""
    name, expected = promised(line)
    found = list(inspect.signature(getattr(weight_utils, name)).parameters.values())
    same = found[: len(expected)]
    assert [(p.name, p.kind) for p in same] == [(p.name, p.kind) for p in expected]
    for ours, theirs in zip(same, expected, strict=True):
        assert theirs.default is EMPTY or ours.default == theirs.default, ours.name
    assert all(p.default is not EMPTY for p in found[len(expected) :])


def test_the_contract_is_whole():
    assert sorted(promised(line)[0] for line in LINES) == sorted(weight_utils.__all__)


def test_nothing_is_defined_here():
    """Everything comes from the module where it belongs."""
    for name in weight_utils.__all__:
        assert getattr(weight_utils, name).__module__ != weight_utils.__name__
        assert getattr(weight_utils, name).__doc__


def test_rank_and_size_are_those_of_the_entered_context():
    """Without a context and a group, one lone rank."""

    def rank_and_size():
        return (
            weight_utils.get_tensor_model_parallel_rank(),
            weight_utils.get_tensor_model_parallel_world_size(),
        )

    assert rank_and_size() == (0, 1)
    with ParallelContext.of_rank(1, tp_size=4):
        assert rank_and_size() == (1, 4)
    assert rank_and_size() == (0, 1)


def test_mapper_has_both_spellings():
    mapper = weight_utils.WeightsMapper(orig_to_new_prefix={"a.": "b."})
    assert mapper.map_name("a.x") == mapper._map_name("a.x") == "b.x"
