"""Tests of distances between sets of images, on sets with known distances."""

import math

import numpy as np
import pytest
import torch

from lion.evaluation.distances import Gaussian, frechet_distance, inception_score, jackknife, precision_recall, radii
from tests.layers.helpers import close


def features(count, width, seed=0, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, width, generator=generator, dtype=torch.float64) + shift


def distance(a, b):
    return frechet_distance(Gaussian.of(a), Gaussian.of(b)).item()


def test_gaussians_have_their_mean_and_covariance():
    for count in (5, 40):
        x = features(count, 8) @ features(8, 8, 1)
        found = Gaussian.of(x)
        assert found.root.shape == (min(count, 8), 8)
        close(found.root.mT @ found.root, x.mT.cov())
        close(found.mean, x.mean(0))


def test_diagonal_gaussians_in_closed_form():
    mean, a, b = torch.tensor([3.0, 0, -1]), torch.tensor([1.0, 2, 0.5]), torch.tensor([2.0, 2, 0])
    left, right = Gaussian(mean.double(), a.double().diag()), Gaussian(torch.zeros(3).double(), b.double().diag())
    assert frechet_distance(left, right).item() == pytest.approx(10 + 1 + 0 + 0.25)


def test_against_the_square_root_of_a_matrix():
    linalg = pytest.importorskip("scipy.linalg")
    a, b = features(300, 6) @ features(6, 6, 1), features(200, 6, 2, shift=0.3) @ features(6, 6, 3)
    covariances = a.mT.cov().numpy(), b.mT.cov().numpy()
    trace = np.trace(sum(covariances)) - 2 * np.trace(linalg.sqrtm(covariances[0] @ covariances[1]).real)
    known = (a.mean(0) - b.mean(0)).square().sum().item() + trace
    assert distance(a, b) == pytest.approx(known, rel=1e-9) and known > 1


@pytest.mark.parametrize("count", [4, 50])
def test_of_more_features_than_images(count):
    """Check that a rotation from a space of 20 dimensions into one of 64 leaves the distance unchanged."""
    turn = torch.linalg.qr(features(64, 64, 9)).Q[:20]  # (20, 64)
    a, b = features(count, 20), features(count, 20, 1, scale=2.0)
    assert distance(a @ turn, b @ turn) == pytest.approx(distance(a, b), rel=1e-9)
    same = distance(1e4 + a @ turn, 1e4 + (a @ turn).flip(0))
    assert 0 <= same < 1e-9


def test_other_directions_share_nothing():
    """Check that covariances (2 / 3) diag(1, 0) and (2 / 3) diag(0, 4) contribute only their traces."""
    x = torch.tensor([-1.0, 0, 1]).double()
    none = torch.zeros_like(x)
    a, b = torch.stack([x, none], 1), torch.stack([none, 2 * x], 1)
    assert distance(a, b) == pytest.approx(1 + 4, abs=1e-12)


def test_the_score_of_classes():
    sure = torch.eye(5).repeat(4, 1)
    assert inception_score(sure).item() == pytest.approx(5)
    assert inception_score(sure[::5]).item() == pytest.approx(1)  # always the same class
    assert inception_score(torch.full((7, 5), 0.2)).item() == pytest.approx(1)
    shares = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    logs = [p * math.log(p / m) for row in shares.tolist() for p, m in zip(row, (0.6, 0.4))]
    assert inception_score(shares).item() == pytest.approx(math.exp(sum(logs) / 2), rel=1e-6)


def test_radii_of_points_on_a_line(monkeypatch):
    monkeypatch.setattr("lion.evaluation.distances.ROWS", 2)
    x = torch.tensor([0.0, 1, 3, 7, 15])[:, None]
    assert radii(x, 1).tolist() == pytest.approx([1, 1, 2, 4, 8])
    assert radii(x, 3).tolist() == pytest.approx([7, 6, 4, 7, 14])
    assert radii(torch.zeros(5, 1), 3).tolist() == [0] * 5


@pytest.mark.parametrize("rows", [3, 1024])
def test_precision_and_recall_of_known_sets(rows, monkeypatch):
    monkeypatch.setattr("lion.evaluation.distances.ROWS", rows)
    real, other = features(40, 4), features(40, 4, 1)

    def found(*sets):
        return [x.item() for x in precision_recall(*sets)]

    assert found(real, real) == [1, 1]
    assert found(real, real.flip(0), radii(real)) == [1, 1]
    assert found(real, other + 100) == [0, 0]
    precision, recall = found(real, other)
    assert precision > 0.5 and recall > 0.5
    collapsed = real[:1] + 1e-3 * other  # all images are close to one real image
    assert found(real, collapsed) == [1, 1 / 40]
    assert found(collapsed, real) == [1 / 40, 1]
    half = torch.cat([real[:20], other[20:] + 100])
    assert found(real, half)[0] == 0.5


def test_precision_and_recall_by_their_definition():
    real, made = features(30, 3), features(25, 3, 1, shift=1.0)

    def reach(x, i):
        return sorted(math.dist(x[i], x[j]) for j in range(len(x)) if j != i)[2]

    def share(x, among):
        x, among = x.tolist(), among.tolist()
        reaches = [reach(among, i) for i in range(len(among))]
        return sum(any(math.dist(p, q) <= r for q, r in zip(among, reaches)) for p in x) / len(x)

    precision, recall = precision_recall(real, made)
    assert precision.item() == pytest.approx(share(made, real)) and 0 < precision < 1
    assert recall.item() == pytest.approx(share(real, made)) and 0 < recall < 1


def test_the_interval_of_a_mean_is_students():
    """Check the jackknife intervals of a mean.

    With ten samples, each left out once, the jackknife error is the standard error. With tenths of more samples it is
    about the standard error.
    """
    x = features(10, 1)[:, 0]
    value, half = jackknife(lambda some: x[some].mean()[None], 10)
    assert value.item() == pytest.approx(x.mean().item())
    assert half.item() == pytest.approx(2.262157 * x.std().item() / math.sqrt(10))
    sets = [features(200, 1, seed)[:, 0] for seed in range(200)]
    inside = 0
    for y in sets:
        value, half = jackknife(lambda some, y=y: y[some].mean()[None], 200)
        inside += abs(value.item()) < half.item()
    assert 0.9 <= inside / 200 <= 0.99
