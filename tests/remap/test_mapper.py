"""Rules for names: their order, what they drop, and that they can be told."""

import pickle
import re

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


def test_names_that_become_one_in_a_dict_are_named():
    """Only one of them can be there."""
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "x.", "b.": "x.", "c.": None})
    with pytest.warns(UserWarning, match=r"^1 names are lost to others: a\.w and b\.w become x\.w$"):
        assert mapper.apply_dict({"a.w": 1, "b.w": 2, "c.w": 3, "d.w": 4}) == {"x.w": 2, "d.w": 4}


@pytest.mark.parametrize(("text", "new"), [("(", "x"), ("a", r"\1"), ("(a)", r"\g<b>"), ("a", "\\")])
def test_rules_that_are_no_regular_expressions(text, new):
    """Said at once, not at the first name that such a rule matches."""
    with pytest.raises(ValueError, match="rule "):
        WeightsMapper(orig_to_new_regex={text: new}).map_name("b")


def test_a_regular_expression_that_is_compiled():
    mapper = WeightsMapper(orig_to_new_regex={re.compile("^A", re.IGNORECASE): "b"})
    assert mapper.map_name("a.a") == "b.a"


def test_a_mapper_that_was_used_can_be_pickled():
    """It goes to the ranks of a cluster, and may have been tried before."""
    ALL.map_name("model.x")
    copy = pickle.loads(pickle.dumps(ALL))
    assert copy == ALL
    assert copy.map_name("model.layer3.attention.gamma") == "layers.3.attn.weight"


class Counted(str):
    """A name that counts how often it is looked at."""

    looks = 0

    def _looked(self):
        Counted.looks += 1
        return self

    def startswith(self, *args):
        return str.startswith(self._looked(), *args)

    def endswith(self, *args):
        return str.endswith(self._looked(), *args)

    def __contains__(self, text):
        return str.__contains__(self._looked(), text)


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_law_each_rule_looks_at_each_name_once(count):
    """However many names there are, and however often: what one costs doesn't depend on the others."""
    substr = {f"part{i}": "" for i in range(3)}
    prefix, suffix = {f"first{i}": "" for i in range(4)}, {f"last{i}": "" for i in range(5)}
    mapper = WeightsMapper(orig_to_new_substr=substr, orig_to_new_prefix=prefix, orig_to_new_suffix=suffix)
    names = [Counted(f"model.layers.{i}.weight") for i in range(count)]
    for _ in range(2):
        Counted.looks = 0
        assert mapper.apply_list(names) == names
        assert Counted.looks == count * (3 + 4 + 5)
