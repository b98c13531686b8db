"""Padding-free transformers: the rows of a micro-batch are one sequence outside attention.

Start reading with `layer_hooks`, which joins rows before a model's layers and splits them after.
`token_sequence` is the joined sequence. `attention` restricts attention to each row.
`cls_only_last_layer` shortens the last layer. `supported_models` lists the tested model types.
`options` is the base class for tasks.
"""
