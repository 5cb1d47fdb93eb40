"""Policy: what the user wants, from files, environment, code and calls, merged into one frozen value.

`layers`  PolicyLayer, merge, precedence          `rules`  what a Policy says about a kernel
`load`    files, mappings, discovery              `watch`  hot reload
`schema`  the file as a whole                     `parse`  bytes to dicts with line numbers
"""
