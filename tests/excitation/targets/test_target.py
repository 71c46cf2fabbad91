"""What a target does unless its class says otherwise, on the smallest one."""

import torch

from excite.excitation.targets.target import Target


class Absolute(Target):
    def outputs(self, returned, batch):
        return returned

    def labels(self, y, batch, deferred=None):
        return y

    def errors(self, output, labels):
        return (output - labels).abs()

    def decide(self, output):
        return output.round()

    def trivial(self, labels):
        return labels.std()


LOW, HIGH, Y = torch.tensor([0.0, 0.2]), torch.tensor([1.0, 0.4]), torch.tensor([0.0, 1.0])


def test_the_loss_is_half_of_the_error_at_either_extreme():
    target = Absolute()
    losses = target.losses(LOW, HIGH, Y)
    assert torch.allclose(losses, torch.tensor([0.5, 0.7]))
    assert torch.equal(target.mean_loss(losses, LOW, HIGH, Y), losses.mean())
    assert torch.equal(target.mean_error(LOW, Y), target.errors(LOW, Y).mean())


def test_decided_in_the_middle_of_the_extremes():
    assert Absolute().right(LOW, HIGH, Y).tolist() == [True, False]


def test_the_batch_is_searched_as_it_is():
    x = torch.zeros(2, 3)
    assert Absolute().searches(x, Y) == (x, None)
    assert Absolute().extremes(LOW, HIGH) == (LOW, HIGH)
