"""Data and model of the examples: handwritten digits and a small network."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

from distcore import Simple


class Digits(Simple):
    """Digits of 8 x 8 pixels. Every second row is marked as a support row, for
    algorithms that need them.
    """

    def data(self):
        images, labels = load_digits(return_X_y=True)
        supports = torch.arange(len(labels)) % 2 == 0
        rows = TensorDataset(
            torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels), supports
        )
        return random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(0))

    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def row_loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")
