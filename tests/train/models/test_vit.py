"""The vision transformer for small images."""

from __future__ import annotations

import pytest
import torch

import excite
from excite.errors import InputError
from excite.train import build

SMALL = {"channels": 1, "size": 8, "outputs": 3, "patch": 4, "width": 8, "depth": 2, "heads": 2}


def test_default_sizes_are_those_of_vit_tiny():
    model = build("vit", outputs=10)
    assert (
        sum(p.numel() for p in model.parameters()) == 5_362_378
    )  # 12 blocks of 444,864, embedding, positions, norm, head
    assert build("vit", **SMALL)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_samples_do_not_see_each_other_and_tokens_do():
    model = build("vit", **SMALL)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model(x)[1:], model(x[1:]))
    gradient = torch.autograd.grad(model(x.requires_grad_())[0].sum(), x)[0]
    assert gradient[0].abs().amax((0, 1)).count_nonzero() == 8
    assert not gradient[1].any()


def test_attention_and_every_affine_layer_are_found():
    wiring = excite.trace(build("vit", **SMALL), torch.randn(2, 1, 8, 8))
    assert len(wiring.layers) == 1 + 2 * 4 + 1
    assert len(wiring.attentions) == 2


@pytest.mark.parametrize("wrong", [{"patch": 3}, {"width": 9}, {"depth": 0}])
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, int]):
    with pytest.raises(InputError, match=f"vit: .*{next(iter(wrong))}"):
        build("vit", **{**SMALL, **wrong})
