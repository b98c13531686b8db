"""Text embeddings from pairs and triplets of texts; see ``task``."""
