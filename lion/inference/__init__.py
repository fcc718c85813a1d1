"""Generation: text token by token, images by diffusion."""
