"""Padding-free transformers: for everything but attention, the rows of a micro-batch are one sequence of tokens.

Begin with `layer_hooks`, which makes that sequence before a model's layers and takes it apart behind them;
`token_sequence` is the sequence, `attention` has each row attend to itself, `cls_only_last_layer` computes less of the
last layer, `supported_models` lists what tests have proved, and `options` is what a task inherits.
"""
