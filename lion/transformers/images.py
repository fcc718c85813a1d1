"""Models of images."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.output_capturing import capture_outputs

from lion.config import present
from lion.models.vit import ViT
from lion.transformers.base import LionPreTrainedModel


class LionForImageClassification(LionPreTrainedModel):
    """A classifier of images (B, channels, height, width), of one size."""

    names: ClassVar[dict[str, str]] = {"vit": "vit"}
    main_input_name = "pixel_values"
    input_modalities = "image"
    model: ViT

    def build(self) -> ViT:
        c = self.config
        settings = self.settings()  # which refuses other kinds of models
        if c.image_size is None:
            raise ValueError("LionConfig: image_size: missing, expected (height, width) in pixels")
        height, width = c.image_size
        return ViT(
            settings,
            image_size=(height, width),
            channels=c.num_channels,
            num_classes=present(c.num_labels, "num_labels"),
            mean=c.mean,
            std=c.std,
        )

    def get_input_embeddings(self) -> nn.Conv2d:
        return self.model.patch

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Return logits (B, num_labels) of images: uint8, or floating point normalised by the image processor.

        A distilled model returns the mean of the logits of its two heads.
        """
        if output_attentions:
            raise ValueError("output_attentions: linear mixers do not compute the matrix of attention")
        if pixel_values.is_floating_point():
            pixel_values = pixel_values.to(self.dtype)
        logits = self.model(pixel_values)
        if isinstance(logits, tuple):  # in training
            logits = (logits[0] + logits[1]) / 2
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
            loss = self.share_of_batch(loss, labels, kwargs.get("num_items_in_batch"))
        return ImageClassifierOutput(loss, logits)
