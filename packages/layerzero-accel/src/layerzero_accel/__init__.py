"""LayerZero's hot path in C. `import layerzero` finds it; `python -m layerzero_accel.build` compiles it."""
