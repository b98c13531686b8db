"""Language models that predict the next token: pre-training on documents,
instruction tuning on conversations.
"""
