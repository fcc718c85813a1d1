import math

import pytest
import torch

from lion.tasks.image_classification import LOSS, TOP1, ImageClassification, ImageClassificationConfig
from lion.tasks.metrics import Mean, MetricOfMeans, MetricOfRows

PERPLEXITY = MetricOfMeans("perplexity", function=math.exp, of=("loss",), higher_is_better=False)


def test_a_metric_writes_its_values():
    assert (TOP1.heading, TOP1.number(0.98221), TOP1.text(0.98221)) == ("top-1 %", "98.22", "98.22 %")
    assert (PERPLEXITY.heading, PERPLEXITY.number(17.418), PERPLEXITY.text(17.418)) == ("perplexity", "17.42", "17.42")
    assert Mean("spearman", digits=4).text(0.8) == "0.8000"
    assert TOP1.scaled(0.25) == 25 and PERPLEXITY.scaled(0.25) == 0.25


@pytest.mark.parametrize(("metric", "better", "worse"), [(TOP1, 0.9, 0.8), (PERPLEXITY, 17.0, 18.0)])
def test_a_metric_has_a_direction(metric, better, worse):
    assert metric.best([worse, better, worse]) == better
    assert metric.as_good(better, worse) and metric.as_good(better, better) and not metric.as_good(worse, better)
    assert metric.as_good(worse, metric.worst) and not metric.as_good(math.nan, metric.worst)
    assert metric.gain(better, over=worse) == pytest.approx(abs(better - worse))
    assert metric.gain(worse, over=better) < 0


def test_what_a_metric_is_made_of():
    assert LOSS.value({"top1": 0.5, "loss": 2.0}, {}) == 2 and not LOSS.higher_is_better
    assert PERPLEXITY.value({"loss": 2.0}, {}) == math.exp(2)
    assert PERPLEXITY.value({"loss": 1e4}, {}) == math.inf  # a run that diverges gets an error message, not a traceback
    both = MetricOfRows("agreement", function=lambda p, y: (p == y).double().mean(), of=("prediction", "label"))
    rows = {"prediction": torch.tensor([1, 2, 3]), "label": torch.tensor([1, 2, 4])}
    assert both.rows == ("prediction", "label") and both.value({}, rows) == pytest.approx(2 / 3)


def test_the_first_metric_of_a_task_chooses_best():
    metrics = ImageClassification.metrics_of(ImageClassificationConfig())
    assert [m.name for m in metrics] == ["top1", "top5", "loss", "above_chance"]
