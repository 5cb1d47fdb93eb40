"""Kernels in a process of their own: for backends that cannot live in this one, or should not.

    worker     what binding gives for an isolated kernel: a callable like any adapter. One child for one backend: starts
               it, asks it in frames over a socket, each with a deadline, restarts it after a delay
    process    the child as an operating system process: spawn, wait, end it, collect it
    wire       the frame, and arguments and results as data in it; no pickle anywhere
    arena      shared host memory, and the parent's arenas;  device_arena: GPU memory over CUDA IPC
    child      the other side

The parent owns all memory and all sizes. Tensors are copied into an arena that both processes have mapped, results are
copied out of it, so a child that dies in the middle leaves nothing half written in the caller's tensors.
"""
