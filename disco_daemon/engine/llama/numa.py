"""Where threads run on a machine with several nodes of memory: on one that has processors for all, or on all nodes."""

from __future__ import annotations

import os

import llama_cpp

from ...system.processors import cores, n_nodes, node_for


def use_nodes(n_threads: int) -> None:
    """Stay near one node's memory, or let llama.cpp spread threads over all; before it begins to load a model.

    Threads that have begun already, and other programs, are left where they are.
    """
    found = cores()
    if n_nodes(found) < 2:
        return
    near = node_for(n_threads, found)
    if near is None:
        llama_cpp.llama_numa_init(llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE)
    elif hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, near)
