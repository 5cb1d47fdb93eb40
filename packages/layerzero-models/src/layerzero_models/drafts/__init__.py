"""Drafted tokens: which of them a target model keeps (`lz.sample_speculative`, `lz.sample_tree`), and trees of them."""
