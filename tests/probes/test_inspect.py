"""Passes of a model over data."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from excite import InputError
from excite.probes import richness
from models import build


def test_loaders():
    model, x = build("mlp", batch=20)
    y = torch.zeros(20)
    truth = richness(model, x, units=True)
    loaders = [
        DataLoader(TensorDataset(x, y), batch_size=6),
        DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True),
        list(x.split(7)),
        [{"input": part} for part in x.split(7)],
    ]
    before = torch.get_rng_state()
    for loader in loaders:
        found = richness(model, loader, units=True)
        for one, other in zip(truth, found):
            assert np.allclose(one.covariance.values, other.covariance.values)
            assert one.units.rank.tolist() == other.units.rank.tolist()
    picked = richness(model, [(y, x)], inputs=lambda batch: batch[1])
    assert np.allclose(picked["0"].covariance.values, truth["0"].covariance.values)
    assert torch.equal(before, torch.get_rng_state())
    assert len(richness(model, iter(x.split(7)))) == 3
    with pytest.raises(InputError, match="several passes"):
        richness(model, iter(x.split(7)), units=True)
