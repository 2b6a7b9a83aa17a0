"""The benchmarks: a module for each, and a package for those of training."""
