"""Making a model and its optimizer: source and weights, LoRA, blocks,
compiling. Begin with `model_source`.
"""
