"""The parts that all benchmarks share: results, timing, child processes, inputs, peers and plots."""
