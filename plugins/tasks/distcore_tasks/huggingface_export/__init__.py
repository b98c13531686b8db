"""A trained model as a Hugging Face folder: model, tokenizer and card, or an adapter
for peft; see ``export``.
"""
