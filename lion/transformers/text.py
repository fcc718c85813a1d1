"""Models of tokens: features, masked and causal language models; the base class of all models of tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from lion.models.bert import Bert, BertEncoder
from lion.models.gpt import GPT
from lion.models.lra import LRAMasked, SequenceEncoder
from lion.models.tokens import TokenModel
from lion.ops.modes import may_wait
from lion.samples.labels import UNLABELLED
from lion.transformers.base import LionPreTrainedModel, loaded, offload_hooks
from lion.transformers.cache import LionCache, cache_of
from lion.transformers.masks import check_next, segments_of, starts_of, valid_of


class LionTextModel(LionPreTrainedModel):
    """Base class of models of token ids (B, L).

    `forward` takes the arguments of `encode`, and those of its class. In models for the Long Range Arena, ids may be
    intensities of pixels, from 0 to 255.
    """

    model: BertEncoder | GPT | SequenceEncoder

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the data, as arguments of our models.

        Raises:
            ValueError: The number of token ids is missing.
        """
        if self.config.vocab_size is None:
            raise ValueError("LionConfig: vocab_size: missing, expected the number of token ids")
        return {"vocabulary": self.config.vocab_size, "length": self.config.length}

    @property
    def sequence_sizes(self) -> dict[str, Any]:
        """The sizes of the data, as arguments of our models for the Long Range Arena."""
        c = self.config
        return {"vocabulary": c.vocab_size, "length": c.length, "mean": c.mean[0], "std": c.std[0]}

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.register_module("tokens", value)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings; all rows then belong to tokens."""
        tokens = super()._resize_token_embeddings(*args, **kwargs)
        self.model.vocabulary = tokens.num_embeddings
        section = dict(self.config.section)
        section.pop("pad_vocabulary", None)
        self.config.model = section
        return tokens

    @capture_outputs
    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        hidden: Tensor | None = None,
        cache: LionCache | None = None,
        past_key_values: LionCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the head, (B, L, dim).

        Args:
            input_ids: Token ids (B, L), or (B, L, ids) where a token has several.
            inputs_embeds: Embeddings (B, L, dim) of the tokens, instead of `input_ids`.
            attention_mask: 1 for tokens, 0 for padding: (B, L), or of all tokens so far if there is a cache.
            position_ids: (B or 1, L), from 0 in each document: where they restart, another document begins.
            token_type_ids: Types of the tokens (B, L), which a model without embeddings of types ignores.
            seq_idx, cu_seq_lens_q: Other descriptions of packed documents, see `segments_of`.
            hidden: Boolean (B, L), True for inputs that `LRAMasked` hides.
            cache: State after the tokens before these, which is updated.
            past_key_values: The same, under its name before transformers 5.24.
            use_cache: Whether to return the state after these tokens. None: not; `config.use_cache` is the default of
                `generate` alone.

        Raises:
            ValueError: A mask or positions that cannot be expressed, or an option that a state does not have.
        """
        if output_attentions:
            raise ValueError("output_attentions: linear mixers do not compute the matrix of attention")
        inputs = input_ids
        if inputs is None:
            inputs = inputs_embeds
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("input_ids, inputs_embeds: expected one of them")
        packed = {"position_ids": position_ids, "seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q}
        if cache is None:
            cache = past_key_values
        if not isinstance(cache, LionCache | None):
            raise ValueError(f"cache: expected a LionCache, got {type(cache).__name__}, which holds keys and values")
        if cache is None and not use_cache:
            rows, length = inputs.shape[:2]
            segments = segments_of((rows, length), attention_mask, **packed)
            more: dict[str, Any] = {}
            if isinstance(self.model, BertEncoder) and self.model.types is not None:
                more["types"] = token_type_ids
            elif hidden is not None:
                more["hidden"] = hidden
            return BaseModelOutputWithPast(self.model.encode(inputs, segments, **more))
        if cache is None:
            cache = LionCache()
        hooks = []
        tpe = getattr(self.model.encoder, "tpe", None)  # streams without a call of its `forward`
        if tpe is not None:
            hooks = offload_hooks(tpe)
        with loaded(hooks):
            x = self.stream(inputs, attention_mask, packed, cache)
        return BaseModelOutputWithPast(x, cache)

    def stream(
        self, inputs: Tensor, attention_mask: Tensor | None, packed: dict[str, Tensor | None], cache: LionCache
    ) -> Tensor:
        """Return the input of the head (B, L, dim) for the next inputs (B, L, ..), and update the cache."""
        if not isinstance(self.model, GPT):
            raise ValueError(f"use_cache: {type(self.model).__name__} reads all tokens at once and has no cache")
        rows, new = inputs.shape[:2]
        device = inputs.device
        valid = valid_of(attention_mask, (rows, cache.seen + new))
        if valid is not None:
            valid = valid[:, -new:]
        positions = packed.pop("position_ids")
        restarts = False
        if positions is not None and may_wait(device):
            if cache.state is None:
                restarts = starts_of(positions, valid, (rows, new)) is not None
            else:
                check_next(positions, cache.state.position, valid, (rows, new))
        if restarts or any(x is not None for x in packed.values()):
            raise ValueError("use_cache: a cache holds one document per row, pass use_cache=False for packed documents")
        if cache.state is None:
            x, cache.state = self.model.encode_first(inputs, valid)
        else:
            longest = self.model.longest
            if longest is not None and may_wait(device) and int(cache.state.position.max()) + new > longest:
                raise ValueError(f"tokens: more than the {longest} position embeddings of this model")
            x, cache.state = self.model.encode_next(inputs, cache.state, valid)
        cache.seen += new
        return x


class LionModel(LionTextModel):
    """A model without a head: token ids (B, L) to features (B, L, dim)."""

    names: ClassVar[dict[str, str]] = {
        "bert": "bert",
        "bert_classifier": "bert",
        "gpt": "gpt",
        "lra": "lra",
        "lra_masked": "lra",
    }

    def build(self) -> TokenModel:
        if self.config.section.get("name") == "vit":
            raise ValueError(
                "LionModel: a model of tokens, this is one of images; its features are the hidden states of "
                "LionForImageClassification (output_hidden_states=True)"
            )
        settings = self.settings()
        if settings.name == "lra":
            model = SequenceEncoder(settings, **self.sequence_sizes)
            model.start()
            return model
        kind = {"bert": BertEncoder, "gpt": GPT}[settings.name]
        return kind(settings, **self.sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the features of the last layer; the arguments are those of `encode`."""
        return self.encode(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)


class LionForMaskedLM(LionTextModel):
    """A masked language model in both directions, or a model for the Long Range Arena that predicts masked inputs."""

    names: ClassVar[dict[str, str]] = {
        "bert": "bert",
        "bert_classifier": "bert",
        "lra": "lra_masked",
        "lra_masked": "lra_masked",
    }
    model: Bert | LRAMasked

    def build(self) -> Bert | LRAMasked:
        settings = self.settings()
        if settings.name == "lra_masked":
            return LRAMasked(settings, **self.sequence_sizes)
        return Bert(settings, **self.sizes)

    def get_output_embeddings(self) -> nn.Linear | None:
        if isinstance(self.model, LRAMasked):
            return self.model.decoder
        return None

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.decoder = value

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings, and the outputs: the decoder, or the bias of a head tied to the embeddings."""
        tokens = super()._resize_token_embeddings(*args, **kwargs)
        if not isinstance(self.model, Bert) or self.model.head.bias is None:
            return tokens
        old = self.model.head.bias
        bias = F.pad(old.detach(), (0, tokens.num_embeddings - len(old)))  # a negative padding cuts
        self.model.head.bias = nn.Parameter(bias, requires_grad=old.requires_grad)
        return tokens

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return logits (B, L, vocab_size), or normalised intensities (B, L, 1) of pixels.

        The other arguments are those of `encode`.

        Args:
            bool_masked_pos: Boolean (B, L), True for inputs that a model for the Long Range Arena hides. A BERT has a
                token for them.
            labels: Ids or intensities (B, L), -100 where there is nothing to predict. The loss is the cross-entropy of
                ids, or the absolute error of normalised intensities. It is averaged over the labels; with
                `num_items_in_batch`, it is summed over them and divided by this number.

        Raises:
            ValueError: `bool_masked_pos` for a BERT.
        """
        if bool_masked_pos is not None and isinstance(self.model, Bert):
            raise ValueError("bool_masked_pos: a BERT reads the mask token of its tokenizer in input_ids")
        found = self.encode(
            input_ids,
            attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            hidden=bool_masked_pos,
            **kwargs,
        )
        logits = self.model.logits(found.last_hidden_state)
        loss = None
        if labels is not None and isinstance(self.model, LRAMasked) and self.config.vocab_size is None:
            errors = logits[..., 0] - self.model.normalised(labels)
            errors = errors[labels != UNLABELLED].abs()
            count = kwargs.get("num_items_in_batch")
            if count is None:
                count = errors.numel()
            loss = errors.sum() / count
        elif labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, found.hidden_states)


class LionForCausalLM(LionTextModel, GenerationMixin):
    """A causal language model. `generate` keeps a state of constant size in linear mixers (`LionCache`)."""

    names: ClassVar[dict[str, str]] = {"gpt": "gpt"}
    model: GPT

    def build(self) -> GPT:
        return GPT(self.settings(), **self.sizes)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `encode` makes a `LionCache`

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LionCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: LionCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, L, vocab_size) of the token after each token, for the last `logits_to_keep` (0: all).

        `labels` (B, L) are token ids, not shifted, and -100 where there is nothing to predict. The other arguments are
        those of `encode`.
        """
        found = self.encode(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept: Tensor | slice
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)
        else:
            kept = logits_to_keep
        logits = self.model.logits(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, cache_of(found), found.hidden_states)
