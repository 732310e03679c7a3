"""Names of KV-cache scales, row by row."""

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raywl.remap import kv_scales
from raywl.remap.kv_scales import maybe_remap_kv_scale_name, remap_kv_scale_weights

ROWS = [
    ("l.self_attn.kv_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.k_proj.k_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.v_proj.v_scale", "l.self_attn.attn.v_scale"),
    ("l.self_attn.k_proj.v_scale", "l.self_attn.attn.v_scale"),
    ("l.self_attn.v_proj.k_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.k_proj.k_scale", "l.self_attn.mla_attn.mla_attn.k_scale"),
    ("l.self_attn.qkv_proj.k_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.qkv_proj.v_scale", "l.self_attn.attn.v_scale"),
    ("l.self_attn.qkqkv_proj.k_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.qkqkv_proj.v_scale", "l.self_attn.attn.v_scale"),
    ("l.mixer.k_proj.k_scale", "l.mixer.attn.k_scale"),
    ("l.mixer.v_proj.v_scale", "l.mixer.attn.v_scale"),
    ("l.self_attn.q.scale", "l.self_attn.attn.q_scale"),
    ("l.self_attn.k_cache.scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.v_cache.scale", "l.self_attn.attn.v_scale"),
    ("l.self_attn.k_proj.output_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.v_proj.output_scale", "l.self_attn.attn.v_scale"),
    ("l.self_attn.prob_scale", "l.self_attn.attn.prob_scale"),
    ("l.self_attn.q_scale", "l.self_attn.attn.q_scale"),
    ("l.self_attn.k_scale", "l.self_attn.attn.k_scale"),
    ("l.self_attn.v_scale", "l.self_attn.attn.v_scale"),
    ("l.attention.k_zero_point", "l.attention.attn.k_zero_point"),
    ("l.attention.q_zero_point", "l.attention.attn.q_zero_point"),
    ("l.attention.v_zero_point", "l.attention.attn.v_zero_point"),
]
"""As in the table of the contract: what a checkpoint has, and what the model has."""
UNCHANGED = [
    "l.self_attn.k_proj.weight",
    "l.self_attn.k_proj.weight_scale",
    "l.self_attn.k_proj.input_scale",
    "l.self_attn.q_proj.output_scale",
    "foo.k_scale_extra",
    "foo.kv_scale.extra",
    "foo.mlp.scale",
    "foo.q.scale",
    "k_scale",
    "l.self_attn.prob_scales",
    "l.mlp.prob_scale",
    "",
]


@pytest.fixture(autouse=True)
def nothing_warned_yet():
    kv_scales._warned.clear()


@pytest.fixture
def heard():
    """The warnings of a test."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.filterwarnings("ignore:kv_scale")
@pytest.mark.parametrize(("name", "new"), ROWS)
def test_a_row(name, new):
    assert maybe_remap_kv_scale_name(name, {new: 0, "l.other": 0}) == new


@pytest.mark.parametrize("name", UNCHANGED)
def test_names_that_no_row_matches(name, heard):
    assert maybe_remap_kv_scale_name(name, {}) == name
    assert not heard


@pytest.mark.parametrize("name", [name for name, _ in ROWS])
def test_what_the_model_has_is_returned_before_anything_else(name, heard):
    assert maybe_remap_kv_scale_name(name, {name: 0, **{new: 0 for _, new in ROWS}}) == name
    assert not heard


@pytest.mark.parametrize("name", [name for name, _ in ROWS])
def test_what_the_model_lacks(name, heard):
    assert maybe_remap_kv_scale_name(name, {"l.self_attn.other": 0}) is None
    assert name in str(heard[-1].message)


def test_the_first_row_decides_even_where_a_later_one_would_do(heard):
    """`qkv_proj.k_scale` isn't `qkv_proj.attn.k_scale`, though the model has that (C12)."""
    params = {"l.self_attn.qkv_proj.attn.k_scale": 0}
    assert maybe_remap_kv_scale_name("l.self_attn.qkv_proj.k_scale", params) is None
    assert len(heard) == 1


def test_mla_comes_first_where_a_model_has_both():
    params = dict.fromkeys(["l.self_attn.attn.k_scale", "l.self_attn.mla_attn.mla_attn.k_scale"])
    assert maybe_remap_kv_scale_name("l.self_attn.k_proj.k_scale", params) == [*params][1]


def test_modelopt_names(heard):
    """C09: mapped where the model has them, else `None` and one warning for each kind, not for each layer."""
    names = [f"model.layers.{i}.self_attn.{x}_proj.{x}_scale" for i in range(50) for x in "kv"]
    params = {"model.layers.1.self_attn.attn.k_scale": 0, "model.layers.1.self_attn.attn.v_scale": 0}
    assert [maybe_remap_kv_scale_name(name, params) for name in names[2:4]] == [*params]
    assert not heard
    empty = {"model.norm": 0}
    assert {maybe_remap_kv_scale_name(name, empty) for name in names} == {None}
    assert len(heard) == 2
    assert "k_scale" in str(heard[0].message)
    assert "v_scale" in str(heard[1].message)


def test_bare_and_fused_names_all_reach_the_attention():
    """C12."""
    stem = "layers.3.self_attn"
    for x in "kv":
        new = f"{stem}.attn.{x}_scale"
        for middle in ("qkv_proj.", "qkqkv_proj.", ""):
            assert maybe_remap_kv_scale_name(f"{stem}.{middle}{x}_scale", {new: 0}) == new
    params = dict.fromkeys([f"{stem}.attn.q_scale", f"{stem}.attn.prob_scale"])
    assert [maybe_remap_kv_scale_name(f"{stem}.{x}_scale", params) for x in ("q", "prob")] == [*params]


def test_the_deprecated_name_warns_once(heard):
    params = {f"layers.{i}.self_attn.attn.k_scale": 0 for i in range(10)}
    found = [maybe_remap_kv_scale_name(f"layers.{i}.self_attn.kv_scale", params) for i in range(10)]
    assert found == [*params]
    assert len(heard) == 1
    assert "deprecated" in str(heard[0].message)


def test_another_model_is_warned_of_again(heard):
    models = [{"a": i} for i in range(3)]
    for params in models * 2:
        maybe_remap_kv_scale_name("l.self_attn.k_scale", params)
    assert len(heard) == 3


def test_what_was_warned_of_is_bounded(heard):
    models = [{"a": i} for i in range(kv_scales._MAX_REMEMBERED + 50)]
    for params in models:
        maybe_remap_kv_scale_name("l.self_attn.k_scale", params)
    assert len(kv_scales._warned) == kv_scales._MAX_REMEMBERED


class Watched(dict):
    """Parameters that can be looked up, but not walked through."""

    def __iter__(self):
        raise AssertionError("walked through")

    keys = items = values = __iter__


def test_nothing_is_searched():
    params = Watched({"l.self_attn.attn.k_scale": 0})
    for name, _ in ROWS:
        with warnings.catch_warnings(record=True):
            maybe_remap_kv_scale_name(name, params)


parts = st.sampled_from(
    "self_attn mixer attn k_proj v_proj qkv_proj qkqkv_proj q k_cache v_cache scale output_scale prob_scale "
    "kv_scale k_scale v_scale q_scale k_zero_point weight layers 0".split()
)
PATTERNS = [
    (r"\.kv_scale", [r".attn.k_scale"]),
    (
        r"\.self_attn\.[kv]_proj\.([kv])_scale",
        [r".self_attn.mla_attn.mla_attn.\1_scale", r".self_attn.attn.\1_scale"],
    ),
    (r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale", [r".self_attn.attn.\1_scale"]),
    (r"\.mixer\.[kv]_proj\.([kv])_scale", [r".mixer.attn.\1_scale"]),
    (r"\.self_attn\.q\.scale", [r".self_attn.attn.q_scale"]),
    (r"\.self_attn\.([kv])_cache\.scale", [r".self_attn.attn.\1_scale"]),
    (r"\.self_attn\.([kv])_proj\.output_scale", [r".self_attn.attn.\1_scale"]),
    (r"\.self_attn\.prob_scale", [r".self_attn.attn.prob_scale"]),
    (r"\.([qkv])_(scale|zero_point)", [r".attn.\1_\2"]),
]


@given(st.lists(parts, min_size=1, max_size=5).map(".".join), st.sampled_from([0, -1, None]))
def test_law_as_the_contract_says_in_regular_expressions(name, have):
    """Written down a second time, another way."""
    expected, there = name, {}
    for pattern, targets in PATTERNS:
        if re.search(pattern + r"\Z", name):
            news = [re.sub(pattern + r"\Z", target, name) for target in targets]
            there = {} if have is None else {news[have]: 0}
            expected = None if have is None else news[have]
            break
    with warnings.catch_warnings(record=True):
        assert maybe_remap_kv_scale_name(name, there) == (name if name in there else expected)


def test_weights_are_renamed_one_by_one(heard):
    params = dict.fromkeys(["l.self_attn.attn.k_scale", "l.self_attn.attn.v_scale", "l.weight"])
    asked = []

    def weights():
        for name in ("l.weight", "l.self_attn.k_proj.k_scale", "l.self_attn.v_scale", "l.unknown"):
            asked.append(name)
            yield name, name

    out = remap_kv_scale_weights(weights(), params)
    assert next(out) == ("l.weight", "l.weight")
    assert len(asked) == 1
    assert list(out) == [
        ("l.self_attn.attn.k_scale", "l.self_attn.k_proj.k_scale"),
        ("l.self_attn.attn.v_scale", "l.self_attn.v_scale"),
        ("l.unknown", "l.unknown"),
    ]
    assert not heard


def test_kv_scale_fills_both(heard):
    params = dict.fromkeys(["l.self_attn.attn.k_scale", "l.self_attn.attn.v_scale"])
    out = remap_kv_scale_weights([("l.self_attn.kv_scale", 0.5)], params)
    assert list(out) == [(name, 0.5) for name in params]
    for name in params:
        assert list(remap_kv_scale_weights([("l.self_attn.kv_scale", 0.5)], {name: 0})) == [(name, 0.5)]
    assert all("deprecated" in str(warning.message) for warning in heard)


def test_scales_without_a_place_are_one_warning_with_counts(heard):
    """C12: a count and an example for each kind, not a line for each layer."""
    names = [f"layers.{i}.self_attn.{x}_proj.{x}_scale" for i in range(3) for x in "kv"]
    out = list(remap_kv_scale_weights([(name, 0) for name in ["norm", *names]], {"norm": 0}))
    assert out == [("norm", 0)]
    assert len(heard) == 1
    assert f"3 k_scale (for example {names[0]}), 3 v_scale (for example {names[1]})" in str(heard[0].message)
