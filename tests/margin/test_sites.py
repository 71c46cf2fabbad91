"""Where perturbations enter a model, and how they lie side by side in one row."""

import torch
from torch import nn

from excite.margin.sites import find_sites


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)), torch.randn(4, 1, 8)


def test_all_layers_own_columns_in_order_of_execution():
    model, x = network()
    sites = find_sites(model, x, "all", None)
    assert [site.name for site in sites.places] == ["0", "3"]
    assert [site.columns for site in sites.places] == [slice(0, 8), slice(8, 20)]
    assert sites.width == 20
    assert sites.entry is sites.places[0]


def test_perturbations_at_a_site_are_those_of_its_input():
    model, x = network()
    sites = find_sites(model, x, "all", None)
    parts = [torch.randn(4, 8), torch.randn(4, 12)]
    hidden = torch.relu(model[0](x + parts[0].reshape(x.shape))).flatten(1)
    torch.testing.assert_close(sites.run(x, parts), model[3](hidden + parts[1]))


def test_signals_are_the_clean_inputs_by_sample():
    model, x = network()
    sites = find_sites(model, x, ["3"], None)
    (signal,) = sites.signals(x)
    torch.testing.assert_close(signal, model[:3](x).detach())
