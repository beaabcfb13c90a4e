//! Programs compiled ahead of time for GPUs, on a machine that has none, and what the compilers say of them.
