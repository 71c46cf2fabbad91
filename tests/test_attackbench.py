"""The measures of `benchmarks.attackbench`, its counts of passes and its networks, on cases that can be worked out by hand."""

import numpy as np
import pytest
import torch
from benchmarks.attackbench.attacks import Contender, contenders
from benchmarks.attackbench.cells import Cell, Counted, cell_path, run_cell
from benchmarks.attackbench.figure import draw, rows_of_page
from benchmarks.attackbench.networks import KINDS, KWinners, make_network, read, save
from benchmarks.attackbench.quality import envelope, near, optimality, paired_difference
from benchmarks.attackbench.tables import Row, rows_of, table, verdicts

ROWS = [
    Row("plain", "inf", "excite", 5, 0.999, 0.98, 250.0, 200.0, 8.5, None),
    Row("plain", "inf", "apgd_t", 5, 0.99, 0.5, 990.0, 960.0, 50.0, None),
]


def test_optimality_of_three_points():
    best = np.array([0.0, 1.0, 2.0])
    # areas up to 2: envelope (0 + 1 + 2)/3 = 1, attack (0 + 1.5 + 2)/3; clean accuracy 2/3 times 2 is 4/3
    assert optimality(np.array([0.0, 1.5, 2.0]), best) == pytest.approx(1 - (0.5 / 3) / (4 / 3 - 1))
    assert optimality(best, best) == 1
    # an attack that finds nothing keeps the clean accuracy up to the largest distance
    assert optimality(np.array([0.0, np.inf, np.inf]), best) == pytest.approx(0)


def test_optimality_equals_the_areas_integrated():
    rng = np.random.default_rng(0)
    best = np.where(rng.random(40) < 0.2, 0, rng.random(40))
    attack = best * (1 + rng.random(40))
    end = best.max()
    grid = np.linspace(0, end, 200_001)
    area = [np.trapezoid((values[:, None] > grid).mean(0), grid) for values in (attack, best)]
    expected = 1 - (area[0] - area[1]) / ((best > 0).mean() * end - area[1])
    assert optimality(attack, best) == pytest.approx(expected, abs=1e-4)  # 40 jumps on a grid of 2e5


def test_envelope_and_points_near_it():
    a, b = np.array([0.0, 1.0, np.inf, np.inf]), np.array([0.0, 1.005, 3.0, np.inf])
    best = envelope({"a": a, "b": b})
    assert best.tolist() == [0, 1, 3, np.inf]
    assert near(a, best) == pytest.approx(2 / 3)
    assert near(b, best) == 1


def test_paired_difference_knows_the_better():
    rng = np.random.default_rng(0)
    best = rng.random(100) + 0.1
    value, low, high = paired_difference(best, best * 1.2, best, resamples=200)
    assert 0 < low <= value <= high


def test_passes_are_counted_forward_and_backward():
    counted = Counted(torch.nn.Linear(3, 2))
    x = torch.zeros(5, 3, requires_grad=True)
    counted(x)
    f = counted(x)
    torch.autograd.grad(f[:, 0].sum(), x, retain_graph=True)
    torch.autograd.grad(f[:, 1].sum(), x)
    with torch.no_grad():
        counted(x)
    assert (counted.forwards, counted.backwards) == (15, 10)


def test_only_examples_of_the_model_count(tmp_path):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0], [0, 1]])), model.bias.zero_()
    x, y = torch.tensor([[0.9, 0.1], [0.6, 0.5], [0.2, 0.8]]), torch.tensor([0, 0, 0])

    def to_corner(counted, points, labels, norm):
        assert len(points) == 2  # the third is misclassified
        found = torch.tensor([[0.0, 1.0], [0.6, 0.5]])
        counted(found)
        return found

    cell = run_cell(model, x, y, "inf", Contender("corner", ("inf",), to_corner))
    assert cell.distances.tolist() == pytest.approx([0.9, np.inf, 0])
    assert (cell.forwards, cell.backwards) == (1, 0)
    path = cell_path(tmp_path, "plain", "inf", "corner")
    cell.write(path)
    again = Cell.read(path)
    assert (again.distances == cell.distances).all()
    assert again.seconds == cell.seconds


def test_verdicts_are_computed_from_cells(tmp_path):
    rng = np.random.default_rng(0)
    best = rng.random(60)
    for name, distances, passes in (("excite", best, 10.0), ("apgd_t", best * 1.1, 100.0)):
        Cell(distances, passes, passes, 1.0, "CPU").write(cell_path(tmp_path, "plain", "inf", name))
    rows = rows_of(tmp_path, "plain", "inf")
    assert [row.attack for row in rows] == ["excite", "apgd_t"]
    assert all(line.startswith("met") for line in verdicts(rows))
    Cell(best * 1.2, 90.0, 90.0, 1.0, "CPU").write(cell_path(tmp_path, "plain", "inf", "excite"))
    assert all(line.startswith("**missed**") for line in verdicts(rows_of(tmp_path, "plain", "inf")))


def test_figure_shows_the_tables_of_the_page(tmp_path):
    page = (
        "### Attackbench, plain, norm inf\n\ncross-entropy; 5 test images; CPU\n\n" + table(ROWS) + "\n\n## Another\n"
    )
    (tmp_path / "page.md").write_text(page + table(ROWS), encoding="utf-8")
    rows = rows_of_page(tmp_path / "page.md")
    assert rows == ROWS
    draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_winners_take_all():
    x = torch.randn(4, 3, 5, 5)
    kept = KWinners(0.2)(x)
    assert ((kept != 0).flatten(1).sum(1) == 15).all()
    assert (kept[kept != 0] >= x.flatten(1).topk(15).values.min()).all()


def test_networks_are_stored_in_half_precision(tmp_path):
    for kind in KINDS:
        model = make_network(kind, 2).eval()
        save(model, tmp_path / f"{kind}.pt")
        x = torch.rand(2, 3, 32, 32)
        again = read(kind, tmp_path / f"{kind}.pt", 2)
        stored = {name: v.half() for name, v in model.state_dict().items() if v.is_floating_point()}
        assert all(torch.equal(again.state_dict()[name], v.float()) for name, v in stored.items())
        assert again(x).shape == (2, 10)


@pytest.mark.slow
def test_our_search_is_a_contender_in_all_norms():
    ours = contenders()[0]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    x = torch.rand(4, 3, 2, 2)
    for norm in ours.norms:
        cell = run_cell(model, x, model(x).argmax(1), norm, ours)
        assert (cell.distances > 0).all()
        assert cell.forwards > 1
