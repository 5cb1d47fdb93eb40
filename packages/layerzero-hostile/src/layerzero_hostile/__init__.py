"""The gate against kernels that pass ordinary checks by cheating."""
