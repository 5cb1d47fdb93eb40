"""The backends that are always there. They enter through the same door as third parties and import only what a
plugin author may: `layerzero.plugin`, `layerzero.model`, `layerzero.reasons` and `layerzero.errors`."""
