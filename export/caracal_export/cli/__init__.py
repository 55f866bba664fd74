"""The subcommands `export`, `demo` and `info` of the command `caracal`."""
