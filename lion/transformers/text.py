"""Models of text: features, masked language models, classifiers of sequences, and causal language models."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from lion.models.bert import Bert, BertClassifier, BertEncoder
from lion.models.gpt import GPT, GPTConfig
from lion.models.tokens import TokenModel
from lion.ops.segments import may_wait
from lion.transformers.base import LionPreTrainedModel
from lion.transformers.cache import LionCache
from lion.transformers.masks import segments_of, starts_of, valid_of

BERT = {"bert": "bert", "bert_classifier": "bert"}


class GPTClassifier(GPT):
    """A GPT that maps the last token of a sequence to `outputs` numbers, by a linear layer without bias."""

    heads = ("classifier.",)

    def __init__(self, config: GPTConfig, *, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        self.classifier = nn.Linear(self.config.dim, outputs, bias=False)
        nn.init.normal_(self.classifier.weight, std=self.config.init_std)

    def logits(self, x: Tensor) -> Tensor:
        """Map the last token of each sequence (B, dim), as of `encode`, to logits (B, outputs)."""
        return self.classifier(x)


class LionTextModel(LionPreTrainedModel):
    """Base class of models of token ids (B, L).

    `forward` takes the arguments of `encode`, and those of its class.
    """

    model: TokenModel

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the data, as arguments of our models.

        Raises:
            ValueError: The number of token ids is missing.
        """
        if self.config.vocab_size is None:
            raise ValueError("LionConfig: vocab_size: missing, expected the number of token ids")
        return {"vocabulary": self.config.vocab_size, "length": self.config.length}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.tokens = value

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embeddings, and the bias of a masked head; all rows then belong to tokens."""
        tokens = super()._resize_token_embeddings(*args, **kwargs)
        rows = self.model.vocabulary = tokens.num_embeddings
        self.config.model = {**self.config.section, "pad_vocabulary": 1}
        head = getattr(self.model, "head", None)
        if head is not None and head.bias is not None:
            bias = head.bias.new_zeros(rows)
            kept = min(rows, len(head.bias))
            bias[:kept] = head.bias.detach()[:kept]
            head.bias = nn.Parameter(bias, requires_grad=head.bias.requires_grad)
        return tokens

    @capture_outputs
    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        past_key_values: LionCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the head, (B, L, dim).

        Args:
            input_ids: Token ids (B, L).
            attention_mask: 1 for tokens, 0 for padding: (B, L), or of all tokens so far if there is a cache.
            position_ids: (B or 1, L), from 0 in each document: where they restart, another document begins.
            token_type_ids: Types of the tokens (B, L), which a model without embeddings of types ignores.
            seq_idx, cu_seq_lens_q: Other descriptions of packed documents, see `segments_of`.
            past_key_values: State after the tokens before `input_ids`, which is updated.
            use_cache: Whether to return the state after `input_ids`.

        Raises:
            ValueError: A mask or positions that cannot be expressed, or an option that a state does not have.
        """
        if output_attentions:
            raise ValueError("output_attentions: linear mixers do not compute the matrix of attention")
        packed = {"position_ids": position_ids, "seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q}
        if past_key_values is None and not use_cache:
            segments = segments_of(tuple(input_ids.shape), attention_mask, **packed)
            types = {"types": token_type_ids} if self.has_types else {}
            return BaseModelOutputWithPast(self.model.encode(input_ids, segments, **types))
        if output_hidden_states or self.config.output_hidden_states:
            raise ValueError("output_hidden_states: not recorded with a cache, pass use_cache=False")
        cache = LionCache() if past_key_values is None else past_key_values
        return BaseModelOutputWithPast(self.stream(input_ids, attention_mask, packed, cache), cache)

    @property
    def has_types(self) -> bool:
        return isinstance(self.model, BertEncoder) and self.model.types is not None

    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None, packed: dict[str, Tensor | None], cache: LionCache
    ) -> Tensor:
        """Return the input of the head (B, L, dim) for the next tokens (B, L), and update the cache."""
        if not isinstance(self.model, GPT):
            raise ValueError(f"use_cache: {type(self.model).__name__} reads all tokens at once and has no cache")
        (rows, new), device = input_ids.shape, input_ids.device
        valid = valid_of(attention_mask, (rows, cache.seen + new))
        valid = None if valid is None else valid[:, -new:]
        positions = packed.pop("position_ids")
        restarts = positions is not None and not cache.seen and may_wait(device)
        if any(x is not None for x in packed.values()) or (
            restarts and starts_of(positions, valid, (rows, new)) is not None
        ):
            raise ValueError("use_cache: a cache holds one document per row, pass use_cache=False for packed documents")
        if cache.state is None:
            x, cache.state = self.model.encode_first(input_ids, valid)
        else:
            longest = self.model.longest
            if longest is not None and may_wait(device) and int(cache.state.position.max()) + new > longest:
                raise ValueError(f"tokens: more than the {longest} position embeddings of this model")
            x, cache.state = self.model.encode_next(input_ids, cache.state, valid)
        cache.seen += new
        return x


class LionModel(LionTextModel):
    """A model without a head: token ids (B, L) to features (B, L, dim)."""

    names: ClassVar[dict[str, str]] = {**BERT, "gpt": "gpt"}

    def build(self) -> TokenModel:
        settings = self.settings()
        return {"bert": BertEncoder, "gpt": GPT}[settings.name](settings, **self.sizes)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPast:
        """Return the features of the last layer; the arguments are those of `encode`."""
        return self.encode(input_ids, attention_mask, **kwargs)


class LionForMaskedLM(LionTextModel):
    """A masked language model, in both directions."""

    names: ClassVar[dict[str, str]] = BERT
    model: Bert

    def build(self) -> Bert:
        return Bert(self.settings(), **self.sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return logits (B, L, vocab_size); `labels` (B, L) is -100 where there is nothing to predict.

        The other arguments are those of `encode`.
        """
        found = self.encode(input_ids, attention_mask, token_type_ids=token_type_ids, **kwargs)
        logits, loss = self.model.logits(found.last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, found.hidden_states)


class LionForSequenceClassification(LionTextModel):
    """A classifier of sequences: of the first token in a BERT, of the last one in a GPT."""

    names: ClassVar[dict[str, str]] = {**dict.fromkeys(BERT, "bert_classifier"), "gpt": "gpt"}
    model: BertClassifier | GPTClassifier

    def build(self) -> BertClassifier | GPTClassifier:
        settings = self.settings()
        kind = {"bert_classifier": BertClassifier, "gpt": GPTClassifier}[settings.name]
        return kind(settings, outputs=self.config.num_labels, **self.sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits (B, num_labels); `labels` (B,) are classes, or numbers if there is one label.

        Padding may be on either side. The other arguments are those of `encode`.
        """
        found = self.encode(input_ids, attention_mask, token_type_ids=token_type_ids, **kwargs)
        x, last = found.last_hidden_state, isinstance(self.model, GPTClassifier)
        valid = valid_of(attention_mask, tuple(input_ids.shape))
        logits, loss = self.model.logits(end_of(x, valid, last)), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(loss, logits, found.hidden_states)


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
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LionCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
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
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.model.logits(found.last_hidden_state[:, kept]), None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, found.past_key_values, found.hidden_states)


def end_of(x: Tensor, valid: Tensor | None, last: bool) -> Tensor:
    """Return the first valid token, or the last one, of each row of x (B, L, dim)."""
    if valid is None:
        return x[:, -1 if last else 0]
    places = torch.arange(x.shape[1], device=x.device)
    place = (valid * places).amax(1) if last else (~valid).long().cummin(1).values.sum(1).clamp(max=x.shape[1] - 1)
    return x[torch.arange(len(x), device=x.device), place]
