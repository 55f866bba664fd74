"""What one would use instead, one module each. Those of other environments are run by `worker` and driven by `process`."""
