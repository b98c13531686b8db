"""LoRA for distcore, by the library peft; ``distcore_lora.adapter`` is the adapter ``lora``."""

__version__ = "0.1.0"
