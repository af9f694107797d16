"""A model of one rank's GPU: streams, events, collectives of NCCL and a caching allocator, over tensors of the CPU.

The host runs every operation at once, so bits are those of the CPU. Beside it the machine keeps what a GPU would do: in which stream
each operation is enqueued, which operations happen before it (machine.py), which memory it reads and writes (accesses.py), and when it
would run (times).
"""
