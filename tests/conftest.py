"""Tests run on few threads, so that several can run side by side and results do not depend on the machine."""

import torch

torch.set_num_threads(1)
