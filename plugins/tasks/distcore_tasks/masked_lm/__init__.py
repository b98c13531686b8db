"""Masked language modeling: predict the hidden tokens of texts, with a model such as BERT."""
