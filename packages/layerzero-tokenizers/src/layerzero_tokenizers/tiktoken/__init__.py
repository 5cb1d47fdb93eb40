"""tiktoken, and the encodings its plugins bring."""
