"""Windows of a bias trajectory against sums over its steps."""

from __future__ import annotations

import torch

from excite.train.dynamics.trajectories import Piece, TrajectoryRecord


def test_windows_add_up_to_the_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(6, 2, 3, 4, dtype=torch.float64, generator=generator)  # 6 steps, 2 networks, 3 points, 4 units
    slope = torch.rand(6, 2, 3, dtype=torch.float64, generator=generator)
    slope[0, 0, 0] = 0.0  # left out and counted
    biases = torch.randn(7, 2, 4, dtype=torch.float64, generator=generator)
    real = torch.ones(6, 3, dtype=torch.bool)
    record = TrajectoryRecord(biases[0], 2)
    for window in range(2):
        part = slice(3 * window, 3 * window + 3)
        record.put(window, Piece.of(d[part], slope[part], real[part], biases[3 * window : 3 * window + 4]))
    trajectory = record.trajectory([3, 3])
    ratio = d.norm(dim=3) / slope
    ratio[0, 0, 0] = 0.0
    torch.testing.assert_close(trajectory.total[:, -1], ratio.sum((0, 2)))
    assert trajectory.zero.tolist() == [[1, 0], [0, 0]]
    torch.testing.assert_close(trajectory.raw.sum(1), (biases[1:] - biases[:-1]).norm(dim=2).sum(0))
    torch.testing.assert_close(trajectory.distance[:, -1], (biases[-1] - biases[0]).norm(dim=1))
    expected = (biases[:-1] - biases[:-1].mean(0)).square().sum(2).mean(0)
    torch.testing.assert_close(trajectory.variance(2), expected)
