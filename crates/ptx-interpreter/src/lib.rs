//! Runs PTX text on a machine without a GPU, written apart from what emits it.
