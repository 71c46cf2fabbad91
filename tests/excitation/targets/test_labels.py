"""Labels of classes: what is accepted, what is refused now or later, how often each class occurs."""

import math

import pytest
import torch

from excite.errors import InputError
from excite.excitation.targets.labels import accepted, class_fractions, class_labels, entropy

Y = torch.tensor([0, 2, 2, 1])


class Collected:
    """Stands for `DeferredChecks`: keeps what is to be judged."""

    def __init__(self):
        self.added = []

    def add(self, numbers, judge):
        self.added.append((numbers, judge))

    def judged(self):
        return [judge(numbers.tolist()) for numbers, judge in self.added]


def test_class_labels_are_whole_numbers_below_m():
    assert torch.equal(class_labels(Y[:, None], 4, 3), Y)
    for y, message in ((Y.float(), "torch.float32"), (Y + 1, "expects 0 to 2; got 3"), (Y[:2], r"got \(2,\)")):
        with pytest.raises(InputError, match=message):
            class_labels(y, 4, 3)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_labels_judged_later_are_changed_until_then(dtype):
    later = Collected()
    y = torch.tensor([0, 1, 5, 1], dtype=dtype)
    kept = accepted(y, 2, lambda label: f"got {label:g}", later)
    assert set(kept.tolist()) <= {0, 1}
    assert later.judged() == ["got 5"]


def test_shares_and_their_entropy():
    assert class_fractions(Y, 3).tolist() == [0.25, 0.25, 0.5]
    assert float(entropy(Y, 3)) == pytest.approx(1.5 * math.log(2))
