"""Gaussian diffusion: adding noise to images (DDPM, 2006.11239), and removing it (DDIM, 2010.02502)."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor

from lion.ops.settings import choice, number

Predict = Callable[[Tensor, Tensor], Tensor]  # noisy images (B, ..), times (B,) -> the noise in them


def linear(count: int) -> Tensor:
    """Return DDPM's variances: from 1e-4 to 0.02 for 1,000 steps, rescaled for other numbers of steps."""
    variances = torch.linspace(0.1 / count, 20 / count, count, dtype=torch.float64)
    return variances.clamp(max=0.999)


def cosine(count: int) -> Tensor:
    """Return the variances of Improved DDPM (2102.09672): the remaining signal follows a squared cosine."""
    cosines = [math.cos((i / count + 0.008) / 1.008 * math.pi / 2) for i in range(count + 1)]
    left = torch.tensor(cosines, dtype=torch.float64).square()
    variances = 1 - left[1:] / left[:-1]
    return variances.clamp(max=0.999)


SCHEDULES: dict[str, Callable[[int], Tensor]] = {"cosine": cosine, "linear": linear}  # number of steps -> variances


class Process:
    """The diffusion process `q(x_t | x_0) = N(sqrt(kept_t) x_0, 1 - kept_t)` for times t = 0 .. `count` - 1.

    `alphas_cumprod` (count,), float64, is the share of an image's variance that remains at each time.

    Raises:
        ValueError: An unknown schedule, or no times.
    """

    def __init__(self, schedule: str, count: int) -> None:
        choice("schedule", schedule, tuple(SCHEDULES))
        number("count", count, Integral, 1)
        self.count = count
        self.alphas_cumprod = torch.cumprod(1 - SCHEDULES[schedule](count), 0)
        self.copies: dict[torch.device, Tensor] = {}  # of `alphas_cumprod`, on the devices of the images

    def noisy(self, x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Add noise (B, ..) to images x (B, ..), according to their times (B,)."""
        if x.device not in self.copies:
            self.copies[x.device] = self.alphas_cumprod.to(x.device)
        alphas_cumprod = self.copies[x.device][times]
        while alphas_cumprod.dim() < x.dim():
            alphas_cumprod = alphas_cumprod.unsqueeze(-1)
        signal = alphas_cumprod.sqrt().to(x.dtype)
        spread = (1 - alphas_cumprod).sqrt().to(x.dtype)
        return signal * x + spread * noise

    def times(self, steps: int) -> list[int]:
        """Return `steps` times, evenly spaced, from the last to the first.

        Raises:
            ValueError: There are fewer than `steps` times.
        """
        if not 1 <= steps <= self.count:
            raise ValueError(f"steps: expected 1 to {self.count}, got {steps}")
        spaced = torch.linspace(self.count - 1, 0, steps, dtype=torch.float64)
        return spaced.round().long().tolist()

    def denoise(
        self,
        predict: Predict,
        x: Tensor,
        *,
        steps: int,
        eta: float = 0.0,
        draw: Callable[[int], Tensor] | None = None,
        bound: float | None = None,
        after_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Generate images (B, ..) from noise x by DDIM.

        Args:
            predict: Function that predicts the noise in images.
            steps: Number of calls of `predict`.
            eta: Share of DDPM's noise that each step adds again; 0: no noise, the result is a function of x.
            draw: Function that draws this noise, shaped like x, for steps 1, 2, ..; needed if `eta` is not 0.
            bound: Largest absolute value of a pixel, if known; predicted images are clamped to it.
            after_step: Function called after each step.

        Raises:
            ValueError: There are fewer than `steps` times, or `eta` is not from 0 to 1, or needs `draw`.
        """
        number("eta", eta, Real, 0, 1)
        if eta and draw is None:
            raise ValueError(f"draw: eta={eta} adds noise, pass a function that draws it")
        times = self.times(steps)
        for step, time in enumerate(times, 1):
            alphas_cumprod = self.alphas_cumprod[time].item()
            left = 1.0  # after the last step
            if step < steps:
                left = self.alphas_cumprod[times[step]].item()
            noise = predict(x, torch.full((len(x),), time, device=x.device))
            start = (x - math.sqrt(1 - alphas_cumprod) * noise) / math.sqrt(alphas_cumprod)
            if bound is not None:
                start = start.clamp(-bound, bound)
                noise = (x - math.sqrt(alphas_cumprod) * start) / math.sqrt(1 - alphas_cumprod)
            fresh = eta * math.sqrt((1 - left) / (1 - alphas_cumprod) * (1 - alphas_cumprod / left))
            rest = max(0.0, 1 - left - fresh**2)
            x = math.sqrt(left) * start + math.sqrt(rest) * noise
            if fresh and draw is not None:
                x = x + fresh * draw(step)
            after_step()
        return x
