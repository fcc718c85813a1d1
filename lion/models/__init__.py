"""The table of models: the recipe's `model.name`."""

from lion.models.base import Model
from lion.models.bert import Bert, BertClassifier
from lion.models.dit import DiT
from lion.models.gpt import GPT
from lion.models.lra import LRA, LRAMasked
from lion.models.token_classifier import TokenClassifier
from lion.models.vit import ViT

MODELS: dict[str, type[Model]] = {
    "bert": Bert,
    "bert_classifier": BertClassifier,
    "dit": DiT,
    "gpt": GPT,
    "lra": LRA,
    "lra_masked": LRAMasked,
    "token_classifier": TokenClassifier,
    "vit": ViT,
}
