"""What is read for a loader that looks at it is freed at once: no collection runs during a load."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import raywl

from .conftest import Model, filled

USES = {
    "max": lambda w: w.max(),
    "in a list": lambda w: torch.cat([w, w]),
    "by keyword": lambda w: torch.add(input=w, other=w),
    "item": lambda w: w[0, 0].item(),
    "converted": lambda w: w.double().sum(),
    "called from elsewhere": lambda w: torch.ops.aten.sum.default(w),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("mapped_or_not")
def test_nothing_that_was_read_stays(write, monkeypatch, use):
    """Also what only torch's own code asks for, where files can't be mapped."""
    alive = []
    real = raywl.loading.lazy_sources.bytes_of

    def watched(raw):
        alive.append(weakref.ref(raw))
        return real(raw)

    monkeypatch.setattr(raywl.loading.lazy_sources, "bytes_of", watched)

    def load(model, weights):
        assert not gc.isenabled()
        for name, weight in weights:
            USES[use](weight)
            model.get_parameter(name).copy_(weight)
        del weight
        assert not [ref for ref in alive if ref() is not None]

    tensors = {name: torch.randn(8, 4) for name in "abc"}
    raywl.load_into(Model({name: filled(8, 4) for name in "abc"}, load), write(tensors))
    if use != "called from elsewhere":
        assert alive
