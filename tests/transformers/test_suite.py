"""transformers' own tests of models (`ModelTesterMixin`), on all classes of `lion.transformers`.

They lie in the source distribution: `pip download --no-binary :all: --no-deps transformers` and `pip install
parameterized`. LION_TRANSFORMERS_SUITE is the folder `tests` of that distribution.
"""

import importlib
import inspect
import os
import sys
import types
import unittest
import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("parameterized")

from lion.transformers import (
    LionForCausalLM,
    LionForImageClassification,
    LionForMaskedLM,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)
from tests.transformers.tiny import config

NAMES = {  # our classes in the tables by which the tests choose labels
    "MODEL_MAPPING_NAMES": LionModel,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": LionForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": LionForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": LionForTokenClassification,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": LionForCausalLM,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": LionForImageClassification,
}
LACKING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def imported(folder):
    """Import transformers' tests, with empty classes for the two modules that the distribution lacks."""
    modules = {"suite": types.ModuleType("suite")}
    modules["suite"].__path__ = [folder]
    for name, mixin in LACKING.items():
        modules[f"suite.{name.split('.')[0]}"] = types.ModuleType(name)
        modules[f"suite.{name}"] = types.ModuleType(name)
        setattr(modules[f"suite.{name}"], mixin, type(mixin, (), {}))
    sys.modules.update(modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # marks that transformers registers in its own configuration
        common = importlib.import_module("suite.test_modeling_common")
    for table, kind in NAMES.items():
        setattr(common, table, {**getattr(common, table), "lion": kind.__name__})
    return common


if "LION_TRANSFORMERS_SUITE" not in os.environ:
    pytest.skip("LION_TRANSFORMERS_SUITE names no folder with the tests of transformers", allow_module_level=True)
COMMON = imported(os.environ["LION_TRANSFORMERS_SUITE"])


class TextTester:
    batch_size, seq_length, is_training = 5, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def __init__(self, name):
        self.name = name

    def get_config(self):
        sizes = {"dim": self.hidden_size, "init_std": 0.02}
        return config(self.name, model=sizes, vocab_size=99, pad_token_id=0, num_labels=3)

    def prepare_config_and_inputs_for_common(self):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 99, (self.batch_size, self.seq_length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 4:] = 0
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


class LongTester(TextTester):
    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {**inputs, "bool_masked_pos": inputs["input_ids"] < 20}


class TokensTester(TextTester):
    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {**inputs, "input_ids": inputs["input_ids"][..., None]}


class ImageTester(TextTester):
    def get_config(self):
        return config("vit", model={"dim": self.hidden_size, "init_std": 0.02}, num_labels=3)

    def prepare_config_and_inputs_for_common(self):
        generator = torch.Generator().manual_seed(0)
        return self.get_config(), {"pixel_values": torch.randn(self.batch_size, 1, 8, 12, generator=generator)}


@pytest.mark.slow
class Suite(COMMON.ModelTesterMixin):
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True

    def test_torch_compile_for_training(self):
        """Run a test that transformers skips without a GPU, on the device that there is."""
        inspect.unwrap(COMMON.ModelTesterMixin.test_torch_compile_for_training)(self)


class TestBert(Suite, unittest.TestCase):
    all_model_classes = (LionModel, LionForMaskedLM, LionForSequenceClassification, LionForTokenClassification)
    _torch_compile_train_cls = LionForMaskedLM

    def setUp(self):
        self.model_tester = TextTester("bert")


class TestLongSequences(Suite, unittest.TestCase):
    all_model_classes = (LionModel, LionForMaskedLM, LionForSequenceClassification)

    def setUp(self):
        self.model_tester = LongTester("lra")


class TestTokens(Suite, unittest.TestCase):
    all_model_classes = (LionForTokenClassification,)

    def setUp(self):
        self.model_tester = TokensTester("token_classifier")


class TestGPT(Suite, unittest.TestCase):
    all_model_classes = (LionModel, LionForCausalLM, LionForSequenceClassification)
    _torch_compile_train_cls = LionForCausalLM

    def setUp(self):
        self.model_tester = TextTester("gpt")

    @unittest.skip("the tests of generation are not in the distribution; test_generation.py replaces them")
    def test_generation_tester_mixin_inheritance(self):
        pass


class TestImages(Suite, unittest.TestCase):
    all_model_classes = (LionForImageClassification,)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = ImageTester("vit")

    @unittest.skip("images have patches instead of token embeddings")
    def test_model_get_set_embeddings(self):
        pass
