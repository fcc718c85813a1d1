"""Table of tasks: the recipe's `task.name` selects the class."""

from lion.tasks.base import Task
from lion.tasks.causal_lm import CausalLM
from lion.tasks.diffusion import Diffusion
from lion.tasks.image_classification import ImageClassification
from lion.tasks.lra import LRATask
from lion.tasks.lra_masked import LRAMaskedTask
from lion.tasks.masked_lm import MaskedLM
from lion.tasks.sequence_classification import SequenceClassification
from lion.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    "causal_lm": CausalLM,
    "diffusion": Diffusion,
    "image_classification": ImageClassification,
    "lra": LRATask,
    "lra_masked": LRAMaskedTask,
    "masked_lm": MaskedLM,
    "sequence_classification": SequenceClassification,
    "token_classification": TokenClassification,
}
