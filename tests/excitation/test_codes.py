"""Class codes: all distances 1, nearest code is what the docs say, two classes are the binary problem shifted."""

import pytest
import torch

from excite import InputError
from excite.excitation.codes import codes, nearest


@pytest.mark.parametrize("less", [0, 1])
def test_all_distances_are_one(less):
    for m in range(2, 101):
        points = codes(m, m - less)
        assert points.shape == (m, m - less)
        distances = (points[:, None] - points[None]).norm(dim=2)
        assert (distances - (1 - torch.eye(m, dtype=torch.float64))).abs().max() < 1e-12
        assert points.sum(0).abs().max() < 1e-12
        assert points.norm(dim=1).var() < 1e-24


@pytest.mark.parametrize("m", [2, 3, 10])
def test_nearest_code_is_argmax_and_nearest_simplex_point(m):
    torch.manual_seed(0)
    for k in (m, m - 1):
        f, points = torch.randn(200, k, dtype=torch.float64), codes(m, k)
        assert torch.equal(nearest(f, points), torch.cdist(f, points).argmin(1))
        if k == m:
            assert torch.equal(nearest(f, points), f.argmax(1))


def test_two_classes_on_one_output():
    assert torch.allclose(codes(2, 1), torch.tensor([[-0.5], [0.5]], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize(
    ("m", "outputs", "message"),
    [(1, 1, "at least 2"), (3, 4, "3 or 2 outputs"), (True, 1, "at least 2"), (2.0, 2, "2.0")],
)
def test_what_has_no_codes_is_refused(m, outputs, message):
    with pytest.raises(InputError, match=message):
        codes(m, outputs)
