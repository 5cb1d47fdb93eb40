"""LayerZero backends for Hugging Face tokenizers, tiktoken and SentencePiece."""
