"""Masked language modelling: texts with tokens hidden, which a model such as BERT finds again."""
