"""A model and a training loop of your own, measured during and after training.

    python own_model.py
    excite margins runs/own-model --trust     # margins of the stored weights, in the unit of the pixels
    excite audit runs/own-model --trust       # excited units, theorems, Lipschitz constants
    excite report runs/own-model

`--trust` lets the commands import this file and call `Net`, as the run says; `--model own_model:Net` names it on the command line
instead. The commands import this file, so the training stands under `if __name__ == "__main__"`.
"""

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

import excite


@dataclass
class Config:
    """Settings of the training."""

    width: int = 16
    lr: float = 0.2
    epochs: int = 20
    batch: int = 64
    seed: int = 0


class Net(nn.Module):
    """A small convolutional network for 8×8 digits."""

    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width * 16, 10)

    def forward(self, x):
        """Ten logits per image."""
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.out(h.flatten(1))


def main(config, folder="runs/own-model"):
    """Trains a network into a run folder."""
    data = excite.data.load("digits", scale=(0, 1))
    torch.manual_seed(config.seed)
    model = Net(config.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    with excite.watch(
        model,
        run=folder,
        optimizer=optimizer,
        train=(data.x_train, data.y_train),
        test=(data.x_test, data.y_test),
        config=asdict(config),
        checkpoint={"factory": "own_model:Net", "options": {"width": config.width}},
    ) as watch:
        for epoch in range(config.epochs):
            for rows in torch.randperm(len(data.x_train)).split(config.batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data.x_train[rows]), data.y_train[rows])
                loss.backward()
                optimizer.step()
                watch.step(loss)
            with torch.no_grad():
                model.eval()
                right = (model(data.x_test).argmax(1) == data.y_test).float().mean()
                model.train()
            watch.log({"test/accuracy": right}, epoch=epoch + 1)


if __name__ == "__main__":
    main(Config())
