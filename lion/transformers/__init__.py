"""The models of this package as `PreTrainedModel`s of `transformers`.

The import registers `LionConfig` and all models, so that the Auto classes find them:
`AutoModelForCausalLM.from_pretrained(folder)`. It also registers Lion-lit and Lion-D as attention functions of other
models: `attn_implementation="lion_lit"`.
"""

try:
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        raise ImportError
except ImportError:
    raise ImportError(
        "lion.transformers needs transformers 5.23 or newer: pip install -U 'transformers>=5.23'"
    ) from None

from lion.transformers.attention import add_decays, check_attention, register_attention
from lion.transformers.cache import LionCache
from lion.transformers.classifiers import LionForSequenceClassification, LionForTokenClassification
from lion.transformers.config import LionConfig
from lion.transformers.delta import chunk_gated_delta_rule, chunk_gated_delta_rule_beta_g, use_delta_rule
from lion.transformers.images import LionForImageClassification
from lion.transformers.remote import AUTO
from lion.transformers.runs import from_run
from lion.transformers.text import LionForCausalLM, LionForMaskedLM, LionModel

__all__ = [
    "LionCache",
    "LionConfig",
    "LionForCausalLM",
    "LionForImageClassification",
    "LionForMaskedLM",
    "LionForSequenceClassification",
    "LionForTokenClassification",
    "LionModel",
    "add_decays",
    "check_attention",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_beta_g",
    "from_run",
    "use_delta_rule",
]

for auto, kind in AUTO.items():
    if auto == "AutoConfig":
        transformers.AutoConfig.register(LionConfig.model_type, LionConfig, exist_ok=True)
        continue
    loader = getattr(transformers, auto)
    loader.register(LionConfig, globals()[kind], exist_ok=True)
    # the trainer, pipelines, `serve` and lm-eval look for names in the table of names that `register` leaves out
    loader._model_mapping._model_mapping[LionConfig.model_type] = kind
register_attention()
