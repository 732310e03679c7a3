"""Rules for names: their order, what they drop, and that they can be told."""

import pickle
import time

import pytest

from raywl.remap.mapper import AppliedRule, WeightsMapper

ALL = WeightsMapper(
    orig_to_new_regex={r"\.layer(\d+)\.": r".layers.\1."},
    orig_to_new_substr={"attention": "attn"},
    orig_to_new_prefix={"model.": "", "lm.": None},
    orig_to_new_suffix={".gamma": ".weight", ".beta": None},
)


def test_kinds_apply_in_their_order():
    """Each kind sees what the one before it has made; `explain` lists each step."""
    assert ALL.explain("model.layer3.attention.gamma") == (
        AppliedRule(
            "regex", r"\.layer(\d+)\.", "model.layer3.attention.gamma", "model.layers.3.attention.gamma"
        ),
        AppliedRule("substr", "attention", "model.layers.3.attention.gamma", "model.layers.3.attn.gamma"),
        AppliedRule("prefix", "model.", "model.layers.3.attn.gamma", "layers.3.attn.gamma"),
        AppliedRule("suffix", ".gamma", "layers.3.attn.gamma", "layers.3.attn.weight"),
    )
    assert ALL.map_name("model.layer3.attention.gamma") == "layers.3.attn.weight"


@pytest.mark.parametrize(
    ("name", "kind", "text"), [("lm.head.beta", "prefix", "lm."), ("model.x.beta", "suffix", ".beta")]
)
def test_the_first_rule_that_drops_a_name_is_the_last_that_is_told(name, kind, text):
    assert ALL.map_name(name) is None
    last = ALL.explain(name)[-1]
    assert (last.kind, last.text, last.after) == (kind, text, None)


def test_a_name_without_a_rule_stays():
    assert ALL.map_name("visual.weight") == "visual.weight"
    assert ALL.explain("visual.weight") == ()


@pytest.mark.parametrize("kind", ["regex", "substr", "prefix", "suffix"])
def test_an_empty_replacement_is_no_drop(kind):
    mapper = WeightsMapper(**{f"orig_to_new_{kind}": {"a": ""}})
    assert mapper.map_name("a") == ""
    assert mapper.explain("a") == (AppliedRule(kind, "a", "a", ""),)


@pytest.mark.parametrize("kind", ["regex", "substr", "prefix", "suffix"])
def test_of_two_mappers_the_second_wins(kind):
    field = f"orig_to_new_{kind}"
    both = WeightsMapper(**{field: {"a": "1", "b": "2"}}) | WeightsMapper(**{field: {"b": "3", "c": None}})
    assert both.apply_list(["a", "b", "c"]) == ["1", "3"]
    assert both.apply_dict({"a": 1, "b": 2, "c": 3}) == {"1": 1, "3": 2}
    assert list(both.apply(iter([("c", 0), ("b", 1)]))) == [("3", 1)]


def test_a_mapper_that_was_used_can_be_pickled():
    """It goes to the ranks of a cluster, and may have been tried before."""
    ALL.map_name("model.x")
    copy = pickle.loads(pickle.dumps(ALL))
    assert copy == ALL
    assert copy.map_name("model.layer3.attention.gamma") == "layers.3.attn.weight"


def test_the_time_grows_with_the_number_of_names():
    """100,000 names through six rules, in CPU time, since other processes may be busy."""
    names = [f"model.layer{i}.attention.gamma" for i in range(100_000)]
    start = time.process_time()
    assert len(ALL.apply_list(names)) == len(names)
    assert time.process_time() - start < 3
