"""Diffusion: a network learns to remove noise from digits (Ho et
al., 2020, https://arxiv.org/abs/2006.11239).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

from distcore import Simple, row_random

PIXELS, WIDTH = 64, 256


class Noisy(Dataset[tuple[Tensor, int, Tensor]]):
    """Images, each at a random time of the way to noise; time and noise follow from
    seed, epoch and row.
    """

    def __init__(self, images: Tensor, kept: Tensor, seed: int, epoch: int = 0) -> None:
        self.images, self.kept, self.seed, self.epoch = images, kept, seed, epoch

    def at(self, epoch: int) -> Noisy:
        """Return the images with the noise of an epoch."""
        return Noisy(self.images, self.kept, self.seed, epoch)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int, Tensor]:
        """Return a noisy image, its time, and the noise in it: line 5 of algorithm 1."""
        random = row_random(self.seed, self.epoch, row)
        time = int(random.integers(len(self.kept)))
        noise = torch.from_numpy(random.standard_normal(PIXELS, dtype="float32"))
        return (
            self.kept[time].sqrt() * self.images[row] + (1 - self.kept[time]).sqrt() * noise,
            time,
            noise,
        )


class Denoiser(nn.Module):
    """Tells the noise in an image of 8 x 8 pixels at a time."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.time = nn.Embedding(times, WIDTH)
        self.image = nn.Linear(PIXELS, WIDTH)
        self.layers = nn.Sequential(
            nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, PIXELS)
        )

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the noise, shape ``(n, 64)``."""
        noise: Tensor = self.layers(self.image(images) + self.time(times))
        return noise


@dataclass(frozen=True, kw_only=True)
class Diffusion(Simple):
    """The loss is the squared error of the noise: equation 14 of the paper."""

    lr: ClassVar = 2e-3

    times: Annotated[int, Field(ge=2)] = 100
    """Steps from an image to noise."""

    def data(self) -> list[Noisy]:
        """Return the digits to train on, and those to evaluate on, with values from -1 to 1."""
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
        return [
            Noisy(images[:1500], kept(self.times), seed=0),
            Noisy(images[1500:], kept(self.times), seed=1),
        ]

    def model(self) -> nn.Module:
        """Return the network."""
        return Denoiser(self.times)

    def row_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean squared error of each row's noise."""
        images, times, noise = batch
        error: Tensor = (model(images, times).float() - noise).square().mean(-1)
        return error


def kept(times: int) -> Tensor:
    """Return the part of an image's variance that is left at each time: alpha-bar of
    the paper's linear schedule.
    """
    scale = 1000 / times  # the paper's schedule is for 1000 steps
    return (1 - torch.linspace(1e-4 * scale, min(0.02 * scale, 0.999), times)).cumprod(0)


@torch.no_grad()
def draw(model: nn.Module, count: int, times: int, generator: torch.Generator) -> Tensor:
    """Return new images, shape ``(count, 64)``: algorithm 2 of the paper."""
    left = kept(times)
    before = torch.cat([torch.ones(1), left[:-1]])
    images = torch.randn(count, PIXELS, generator=generator)
    for time in reversed(range(times)):
        alpha = left[time] / before[time]
        noise = model(images, torch.full((count,), time))
        images = (images - (1 - alpha) / (1 - left[time]).sqrt() * noise) / alpha.sqrt()
        if time:
            images += (1 - alpha).sqrt() * torch.randn(count, PIXELS, generator=generator)
    return images
