"""Hugging Face tokenizers."""
