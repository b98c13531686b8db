"""The tasks of lm-eval, EleutherAI's evaluation harness, measured in a run by its strategy."""
