"""Evaluation of trained models: in every form, at other lengths, by multiple choice, by distances of images."""
