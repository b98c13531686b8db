"""The tasks that come with distcore: text, images, language models, translation, tagging."""

__version__ = "0.1.0"
